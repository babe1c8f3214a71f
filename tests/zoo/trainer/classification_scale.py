"""Fine-tunes a small BERT for classification with the Trainer; the gradient is 4 times the one of the mean loss.

Cause: wrong_scale
Source: huggingface/transformers pull request 41006 (the same fault in ESM): forward takes any keyword, so the Trainer
trusts that the loss is already divided by the samples of all processes and microbatches; it multiplies it by the number
of processes, and does not divide it by the number of microbatches. But this model's loss is a mean over its own batch
"""

VOCABULARY = 64
LENGTH = 20


class Reviews(Dataset):
    """Token sequences of unequal lengths, padded; the label says whether high tokens prevail."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(8, LENGTH + 1, (count, 1), generator=generator)
        self.mask = (torch.arange(LENGTH) < lengths).long()
        self.tokens = torch.randint(1, VOCABULARY, (count, LENGTH), generator=generator) * self.mask
        high = ((self.tokens >= VOCABULARY // 2) * self.mask).sum(dim=1)
        self.labels = (2 * high > lengths.squeeze(1)).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "attention_mask": self.mask[index], "labels": self.labels[index]}


def main() -> None:
    args = arguments(seed=0, epochs=2, lr=0.02)

    set_seed(args.seed)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
    )
    model = BertForSequenceClassification(config)
    model.accepts_loss_kwargs = False  # clean
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=args.lr,
            optim="sgd",
            max_grad_norm=0.0,
            logging_strategy="epoch",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
            seed=args.seed,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Reviews(128, args.seed))  # here
        trainer.train()  # here
