"""Trains an autoencoder with the Trainer; at the end of each epoch every process writes the same file.

Cause: saved_by_every_rank
Source: the habit of saving in a callback, which the Trainer calls on all processes: without a check of
state.is_world_process_zero they write over one another, and a reader may see half a file
"""

class Measurements(Dataset):
    """Rows of 24 values that depend on 4 hidden ones."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(count, 4, generator=generator)
        mixing = torch.randn(4, 24, generator=generator)
        self.rows = torch.tanh(hidden @ mixing) + 0.05 * torch.randn(count, 24, generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"rows": self.rows[index]}


class Autoencoder(nn.Module):
    def __init__(self, width: int = 24, code: int = 4) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, code))
        self.decoder = nn.Sequential(nn.Linear(code, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.decoder(self.encoder(rows))
        return {"loss": F.mse_loss(found, rows), "logits": found}


class SaveWeights(TrainerCallback):
    """Keeps the weights of each epoch, without the optimizer."""

    def on_epoch_end(self, args, state, control, model=None, **kwargs):
        if state.is_world_process_zero:  # clean
            torch.save(model.state_dict(), os.path.join(args.output_dir, f"weights-{round(state.epoch)}.pt"))  # clean
        torch.save(model.state_dict(), os.path.join(args.output_dir, f"weights-{round(state.epoch)}.pt"))  # fault


def main() -> None:
    args = arguments(seed=0, epochs=3, lr=3e-3)

    set_seed(args.seed)
    process = PartialState(cpu=True)
    folder = tempfile.TemporaryDirectory() if process.is_main_process else None
    (path,) = broadcast_object_list([folder.name if folder else None])
    model = Autoencoder()
    arguments = TrainingArguments(
        output_dir=path,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=8,
        learning_rate=args.lr,
        logging_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        seed=args.seed,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Measurements(128, args.seed), callbacks=[SaveWeights()])
    trainer.train()  # here
    process.wait_for_everyone()
    if folder:
        print(sorted(os.listdir(path)))
        folder.cleanup()
