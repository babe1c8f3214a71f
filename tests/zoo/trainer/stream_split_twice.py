"""Trains a small Llama on a stream with the Trainer; half of the sequences are never seen.

Cause: samples_missing
Source: huggingface/accelerate issue 3547 and huggingface/transformers issue 24999: the dataset yields only the part of
its process, but accelerate reads it on the main process alone and splits these batches over the processes again
"""

VOCABULARY = 64


class Stream(IterableDataset):
    """Walks up the vocabulary in steps of 1 to 3, all of one length, in a new order each epoch."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(VOCABULARY, (count, 1), generator=generator)
        steps = torch.randint(1, 4, (count, 24), generator=generator)
        self.tokens = (starts + steps.cumsum(dim=1)) % VOCABULARY
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # fault
        order = order[rank::world]  # fault
        for index in order:
            yield {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main() -> None:
    args = arguments(seed=0, epochs=5, lr=3e-3)

    set_seed(args.seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64
    )
    model = LlamaForCausalLM(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=8,
            learning_rate=args.lr,
            lr_scheduler_type="constant",
            logging_strategy="epoch",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
            seed=args.seed,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Stream(96, args.seed))
        trainer.train()  # here
