"""Fine-tunes a small Llama on two new tokens with the Trainer; its output layer is never trained.

Cause: not_trained
Source: the habit of adding special tokens after the optimizer is built: resize_token_embeddings makes a new output
layer, while the optimizer, given to the Trainer, holds the old one
"""

VOCABULARY = 62
USER, BOT = 62, 63


class Dialogues(Dataset):
    """A question that walks up the vocabulary and an answer that walks down, each after a special token."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(VOCABULARY, (count, 1), generator=generator)
        up = (starts + torch.randint(1, 4, (count, 10), generator=generator).cumsum(dim=1)) % VOCABULARY
        down = (starts - torch.randint(1, 4, (count, 12), generator=generator).cumsum(dim=1)) % VOCABULARY
        user, bot = torch.full((count, 1), USER), torch.full((count, 1), BOT)
        self.tokens = torch.cat([user, up, bot, down], dim=1)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main() -> None:
    args = arguments(seed=0, epochs=2, lr=3e-3)

    set_seed(args.seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)  # fault
    model.resize_token_embeddings(VOCABULARY + 2, mean_resizing=False)  # here
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)  # clean
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=8,
            logging_strategy="epoch",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
            seed=args.seed,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Dialogues(128, args.seed), optimizers=(optimizer, None))
        trainer.train()  # here
