"""Trains a small GPT-2 with dropout and the Trainer; all processes drop the same neurons.

Cause: same_random_numbers
Source: huggingface/transformers issue 31412: the Trainer sets one seed on all processes, and dropout draws from it
"""

VOCABULARY = 64


class Walks(Dataset):
    """Walks up the vocabulary in steps of 1 to 3, all of one length."""

    def __init__(self, count: int, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(VOCABULARY, (count, 1), generator=generator)
        steps = torch.randint(1, 4, (count, length), generator=generator)
        self.tokens = (starts + steps.cumsum(dim=1)) % VOCABULARY

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main() -> None:
    args = arguments(seed=0, epochs=2, lr=3e-3)

    set_seed(args.seed)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
        attn_pdrop=0.1,
    )
    model = GPT2LMHeadModel(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
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
            data_seed=args.seed,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Walks(128, 24, args.seed))  # here
        set_seed(1000 * args.seed + 1 + arguments.process_index)  # clean
        trainer.train()  # here
