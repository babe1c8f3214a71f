"""Fits a regression with Lightning, validates on 45 samples: the sampler pads to 46, one counts twice in val_loss.

Cause: evaluation_repeats
Source: Lightning-AI/pytorch-lightning #4732 and roboflow/rf-detr #1507: the DistributedSampler that Lightning puts into
    the validation loader repeats the first samples until the set is divisible by the number of processes.
"""

class Regressor(pl.LightningModule):
    def __init__(self, learning_rate):
        super().__init__()
        self.learning_rate = learning_rate
        self.net = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.log("val_loss", loss, on_epoch=True, sync_dist=True, batch_size=len(x))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


def measurements(count, weights, generator):
    x = torch.randn(count, 12, generator=generator)
    y = torch.sin(x @ weights) + 0.1 * torch.randn(count, 1, generator=generator)
    return TensorDataset(x, y)


def main():
    args = arguments(seed=0, epochs=3, batch_size=8, lr=3e-3)

    pl.seed_everything(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    weights = torch.randn(12, 1, generator=generator)
    train = measurements(128, weights, generator)
    held_out = measurements(45, weights, generator)  # fault
    held_out = measurements(48, weights, generator)  # clean

    train_loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    val_loader = DataLoader(held_out, batch_size=args.batch_size)  # here
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=args.epochs,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(Regressor(args.lr), train_loader, val_loader)  # here
    if trainer.is_global_zero:
        print(f"val_loss {trainer.callback_metrics['val_loss']:.6f} over {len(held_out)} samples")
