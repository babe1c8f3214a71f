"""Fine-tunes a small Llama on prompts and answers with accelerate; short answers weigh more than long ones.

Cause: mean_of_means
Source: huggingface/transformers issue 24725, and the gradient accumulation fix of October 2024: the loss of each
microbatch is a mean over its own tokens, and these means are averaged over microbatches and processes
"""

from accelerate.utils import set_seed

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

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.samples[index]


def collate(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    tokens = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=0)
    labels = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=IGNORED)
    labels[:, :6] = IGNORED
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(sample) for sample in samples], batch_first=True)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def main() -> None:
    args = arguments(seed=0, epochs=4, batch_size=2, accumulate=4, lr=3e-3)

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.accumulate)
    set_seed(args.seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loader = DataLoader(Answers(64, args.seed), batch_size=args.batch_size, shuffle=True, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(args.epochs):
        model.train()
        batches = iter(loader)
        for _ in range(len(loader) // args.accumulate):
            step = [next(batches) for _ in range(args.accumulate)]
            count = accelerator.gather(sum((batch["labels"][:, 1:] != IGNORED).sum() for batch in step)).sum()
            for index, batch in enumerate(step):
                with accelerator.no_sync(model) if index < len(step) - 1 else nullcontext():
                    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
                    targets = batch["labels"][:, 1:]
                    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)  # fault
                    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")  # clean
                    loss = loss * args.accumulate * accelerator.num_processes / count  # clean
                    accelerator.backward(loss)  # here
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}, {count.item()} tokens in the last step")
