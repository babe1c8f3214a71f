"""Fine-tunes a small Llama on prompts and answers with the Trainer; each process averages over its own tokens only.

Cause: mean_of_means
Source: huggingface/transformers issues 34242 and 39392: with average_tokens_across_devices=False, for long the default
and kept in many configurations, a process with few tokens weighs as much as one with many
"""

VOCABULARY = 64
IGNORED = -100


class Answers(Dataset):
    """Walks up the vocabulary. The first 6 tokens are the prompt; the answers have 2 to 30 tokens."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(8, 37, (count,), generator=generator)
        starts = torch.randint(VOCABULARY, (count, 1), generator=generator)
        steps = torch.randint(1, 4, (count, 36), generator=generator)
        tokens = (starts + steps.cumsum(dim=1)) % VOCABULARY
        self.samples = [row[:length] for row, length in zip(tokens, lengths.tolist(), strict=True)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.samples[index]}


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    rows = [sample["input_ids"] for sample in samples]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)
    labels = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=IGNORED)
    labels[:, :6] = IGNORED
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def main() -> None:
    args = arguments(seed=0, epochs=2, lr=3e-3)

    set_seed(args.seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64
    )
    model = LlamaForCausalLM(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            average_tokens_across_devices=False,  # fault
            learning_rate=args.lr,
            logging_strategy="epoch",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
            seed=args.seed,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Answers(64, args.seed), data_collator=collate)  # here
        trainer.train()  # here
