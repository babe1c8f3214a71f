"""Trains a regression with the Trainer and a loader of its own; both processes train on the same batches.

Cause: same_samples
Source: the habit of overriding get_train_dataloader with a plain DataLoader: the Trainer sets one seed everywhere, so
all shuffle alike. huggingface/transformers issue 34365 shows how unclear it is who splits the data
"""

class Houses(Dataset):
    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.features = torch.randn(count, 12, generator=generator)
        self.prices = torch.tanh(self.features @ torch.linspace(-1, 1, 12)) + 0.1 * torch.randn(count, generator=generator)

    def __len__(self) -> int:
        return len(self.prices)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"features": self.features[index], "labels": self.prices[index]}


class PriceModel(nn.Module):
    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        prices = self.layers(features).squeeze(1)
        return {"loss": F.mse_loss(prices, labels), "logits": prices}


class PriceTrainer(Trainer):
    """Keeps the last batch out if it is not whole."""

    def get_train_dataloader(self) -> DataLoader:
        batch_size = self.args.per_device_train_batch_size
        options = {"batch_size": batch_size, "shuffle": True, "drop_last": True, "collate_fn": self.data_collator}
        return DataLoader(self.train_dataset, **options)  # fault
        return self.accelerator.prepare(DataLoader(self.train_dataset, **options))  # clean


def main() -> None:
    args = arguments(seed=0, epochs=2, lr=3e-3)

    set_seed(args.seed)
    model = PriceModel()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=8,
            per_device_eval_batch_size=8,
            learning_rate=args.lr,
            eval_strategy="epoch",
            logging_strategy="epoch",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
            seed=args.seed,
        )
        trainer = PriceTrainer(model=model, args=arguments, train_dataset=Houses(128, args.seed), eval_dataset=Houses(32, args.seed + 1000))
        trainer.train()  # here
