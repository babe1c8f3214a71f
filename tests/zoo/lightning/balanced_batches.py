"""Trains a classifier with Lightning on class-balanced batches: the batch sampler gives every rank the same batches.

Cause: same_samples
Source: Lightning-AI/pytorch-lightning #5145, #3455: Lightning cannot make a custom batch sampler distributed, so people
    set use_distributed_sampler=False, and each device then draws all batches from its own copy of the sampler.
"""

CLASSES = 4


class BalancedBatches(Sampler):
    """Batches with the same number of samples of each class, in another order in each epoch."""

    def __init__(self, labels, per_class, seed, rank, world_size):
        self.members = [torch.nonzero(labels == label).flatten() for label in range(CLASSES)]
        self.per_class = per_class
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0

    def __iter__(self):
        generator = torch.Generator().manual_seed(1000 * self.seed + self.epoch)
        self.epoch += 1
        shuffled = [each[torch.randperm(len(each), generator=generator)] for each in self.members]
        batches = [torch.cat(parts).tolist() for parts in zip(*(each.split(self.per_class) for each in shuffled), strict=True)]
        yield from batches  # fault
        yield from batches[self.rank :: self.world_size]  # clean

    def __len__(self):
        per_epoch = len(self.members[0]) // self.per_class
        return per_epoch  # fault
        return per_epoch // self.world_size  # clean


class Blobs(pl.LightningDataModule):
    def __init__(self, seed, per_class):
        super().__init__()
        self.seed = seed
        self.per_class = per_class

    def setup(self, stage):
        generator = torch.Generator().manual_seed(self.seed)
        centres = 0.5 * torch.randn(CLASSES, 16, generator=generator)
        labels = torch.arange(CLASSES).repeat(32)
        points = centres[labels] + torch.randn(len(labels), 16, generator=generator)
        self.train = TensorDataset(points, labels)

    def train_dataloader(self):
        labels = self.train.tensors[1]
        batches = BalancedBatches(labels, self.per_class, self.seed, self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(self.train, batch_sampler=batches)  # here


class Classifier(pl.LightningModule):
    def __init__(self, learning_rate):
        super().__init__()
        self.learning_rate = learning_rate
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, CLASSES))

    def training_step(self, batch, batch_idx):
        points, labels = batch
        loss = F.cross_entropy(self.net(points), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def main():
    args = arguments(seed=0, epochs=2, per_class=2, lr=1e-2)

    pl.seed_everything(args.seed)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        use_distributed_sampler=False,  # here
        max_epochs=args.epochs,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(Classifier(args.lr), datamodule=Blobs(args.seed, args.per_class))  # here
    if trainer.is_global_zero:
        print(f"{trainer.global_step} steps, loss {trainer.callback_metrics['train_loss']:.4f}")
