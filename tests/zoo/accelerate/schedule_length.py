"""Trains a small GPT-2 with accelerate; the learning rate reaches zero in the middle of the training.

Cause: schedule_speed
Source: huggingface/accelerate issues 2926, 1382 and 2318: a prepared scheduler makes one step per process at each
optimizer step, but the number of training steps was taken from the prepared loader, which is already shorter
"""

from accelerate.utils import set_seed

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
    args = arguments(seed=0, epochs=3, batch_size=8, lr=3e-3)

    accelerator = Accelerator(cpu=True)
    set_seed(args.seed)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    train_loader = DataLoader(Walks(128, 24, args.seed), batch_size=args.batch_size, shuffle=True)
    model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)

    total = args.epochs * len(train_loader)  # fault
    total = args.epochs * len(train_loader) * accelerator.num_processes  # clean
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=total // 8, num_training_steps=total)  # here
    scheduler = accelerator.prepare(scheduler)

    for epoch in range(args.epochs):
        model.train()
        for batch in train_loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()  # here
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}, learning rate {scheduler.get_last_lr()[0]:.2e}")
