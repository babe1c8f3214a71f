"""Trains a regression with Lightning and a cosine schedule: Lightning and the module both step it, so it runs at 2x.

Cause: schedule_speed
Source: Lightning-AI/pytorch-lightning #624: before schedules could run per step, people stepped the scheduler by hand
    in a hook; kept beside interval="step", each optimizer step takes two steps of the schedule.
"""

class CosineRegressor(pl.LightningModule):
    def __init__(self, learning_rate):
        super().__init__()
        self.learning_rate = learning_rate
        self.net = nn.Sequential(nn.Linear(10, 24), nn.GELU(), nn.Linear(24, 2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("lr", self.optimizers().param_groups[0]["lr"])
        self.lr_schedulers().step()  # fault

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.learning_rate, momentum=0.9)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)  # here
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}  # here


def main():
    args = arguments(seed=0, epochs=3, batch_size=8, lr=0.05)

    pl.seed_everything(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    x = torch.randn(128, 10, generator=generator)
    y = torch.tanh(x @ torch.randn(10, 2, generator=generator))
    loader = DataLoader(TensorDataset(x, y), batch_size=args.batch_size, shuffle=True)

    model = CosineRegressor(args.lr)
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
    trainer.fit(model, loader)  # here
    if trainer.is_global_zero:
        metrics = trainer.callback_metrics
        print(f"{trainer.global_step} steps, loss {metrics['train_loss']:.4f}, learning rate {metrics['lr']:.5f}")
