"""Trains a regression with Lightning's manual optimization over 4 microbatches: not divided, gradients are 4x.

Cause: wrong_scale
Source: Lightning-AI/pytorch-lightning #12811 and #17957: the documented example of accumulation in manual optimization
    did not divide the loss, and Lightning, which divides in automatic optimization, does not in manual.
"""

class Accumulating(pl.LightningModule):
    def __init__(self, learning_rate, accumulate):
        super().__init__()
        self.automatic_optimization = False
        self.learning_rate = learning_rate
        self.accumulate = accumulate
        self.net = nn.Sequential(nn.Linear(14, 28), nn.SiLU(), nn.Linear(28, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        last = (batch_idx + 1) % self.accumulate == 0
        with contextlib.nullcontext() if last else self.trainer.strategy.block_backward_sync():
            loss = F.mse_loss(self.net(x), y)
            self.manual_backward(loss)  # fault
            self.manual_backward(loss / self.accumulate)  # clean
        if last:
            optimizer.step()  # here
            optimizer.zero_grad()
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(x))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate, momentum=0.9)


def main():
    args = arguments(seed=0, epochs=3, batch_size=4, accumulate=4, lr=0.01)

    pl.seed_everything(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    x = torch.randn(192, 14, generator=generator)
    y = torch.sin(x @ torch.randn(14, 1, generator=generator))
    loader = DataLoader(TensorDataset(x, y), batch_size=args.batch_size, shuffle=True)

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
    trainer.fit(Accumulating(args.lr, args.accumulate), loader)
    if trainer.is_global_zero:
        print(f"{trainer.global_step} steps, loss {trainer.callback_metrics['train_loss']:.4f}")
