"""Fine-tunes a pretrained encoder with Lightning: it was loaded in eval mode and stays so, its dropout never acts.

Cause: training_in_eval_mode
Source: Lightning-AI/pytorch-lightning #20105, #20128, #20573: since 2.2 the Trainer keeps the mode of each submodule,
    and loaders like from_pretrained return a model in eval mode.
"""

def load_encoder(features, width, seed):
    """The encoder with its pretrained weights, ready for inference."""
    encoder = nn.Sequential(nn.Linear(features, width), nn.GELU(), nn.Dropout(0.2), nn.Linear(width, width), nn.GELU(), nn.Dropout(0.2))
    generator = torch.Generator().manual_seed(seed + 7)
    weights = {name: torch.randn(value.shape, generator=generator) / width**0.5 for name, value in encoder.state_dict().items()}
    encoder.load_state_dict(weights)
    return encoder.eval()


class FineTuned(pl.LightningModule):
    def __init__(self, seed, learning_rate):
        super().__init__()
        self.seed = seed
        self.learning_rate = learning_rate
        self.encoder = load_encoder(20, 32, seed)  # here
        self.encoder.train()  # clean
        self.head = nn.Linear(32, 3)

    def on_train_start(self):
        torch.manual_seed(self.seed + self.global_rank)  # each rank draws its own dropout masks

    def training_step(self, batch, batch_idx):
        x, labels = batch
        logits = self.head(self.encoder(x))  # here
        loss = F.cross_entropy(logits, labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def main():
    args = arguments(seed=0, epochs=3, batch_size=8, lr=3e-3)

    pl.seed_everything(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    x = torch.randn(128, 20, generator=generator)
    labels = (x @ torch.randn(20, 3, generator=generator)).argmax(1)
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
    trainer.fit(FineTuned(args.seed, args.lr), loader)  # here
    if trainer.is_global_zero:
        print(f"{trainer.global_step} steps, loss {trainer.callback_metrics['train_loss']:.4f}")
