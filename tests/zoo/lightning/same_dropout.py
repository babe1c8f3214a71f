"""Trains a classifier with dropout with Lightning: seed_everything seeds all ranks alike, so their dropout masks agree.

Cause: same_random_numbers
Source: huggingface/transformers #31412 (masks equal on all devices cost accuracy) and the Lightning habit of calling
    seed_everything(seed) at the top; its DDP strategy sets that seed again on each rank when fit starts.
"""

class DropoutClassifier(pl.LightningModule):
    def __init__(self, seed, learning_rate, dropout):
        super().__init__()
        self.seed = seed
        self.learning_rate = learning_rate
        self.embed = nn.Linear(18, 48)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(48, 5)

    def on_train_start(self):  # clean
        torch.manual_seed(self.seed + self.global_rank)  # clean

    def forward(self, x):
        return self.head(self.dropout(F.relu(self.embed(x))))  # here

    def training_step(self, batch, batch_idx):
        x, labels = batch
        loss = F.cross_entropy(self(x), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


def main():
    args = arguments(seed=0, epochs=3, batch_size=8, lr=5e-3, dropout=0.3)

    pl.seed_everything(args.seed, workers=True)  # here
    generator = torch.Generator().manual_seed(args.seed)
    x = torch.randn(128, 18, generator=generator)
    labels = (x @ torch.randn(18, 5, generator=generator)).argmax(1)
    loader = DataLoader(TensorDataset(x, labels), batch_size=args.batch_size, shuffle=True)

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=args.epochs,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(DropoutClassifier(args.seed, args.lr, args.dropout), loader)  # here
    if trainer.is_global_zero:
        print(f"{trainer.global_step} steps, loss {trainer.callback_metrics['train_loss']:.4f}")
