"""Fine-tunes a small BERT for classification with accelerate; accuracy and loss count some validation samples twice.

Cause: evaluation_repeats
Source: huggingface/accelerate issues 350 and 226: a prepared loader fills up its last batches with samples of the
first ones, and accelerator.gather returns these too
"""

from accelerate.utils import set_seed

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


def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> tuple[float, float, int]:
    model.eval()
    losses, hits = [], []
    for batch in loader:  # here
        labels = batch.pop("labels")
        with torch.no_grad():
            logits = model(**batch).logits
        loss = F.cross_entropy(logits, labels, reduction="none")
        hit = (logits.argmax(dim=-1) == labels).float()
        loss, hit = accelerator.gather((loss, hit))  # fault
        loss, hit = accelerator.gather_for_metrics((loss, hit))  # clean
        losses.append(loss)
        hits.append(hit)
    return torch.cat(losses).mean().item(), torch.cat(hits).mean().item(), len(torch.cat(hits))


def main() -> None:
    args = arguments(seed=0, epochs=2, batch_size=8, lr=1e-3)

    accelerator = Accelerator(cpu=True)
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    train_loader = DataLoader(Reviews(128, args.seed), batch_size=args.batch_size, shuffle=True)
    eval_loader = DataLoader(Reviews(45, args.seed + 1000), batch_size=args.batch_size)  # here
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)

    for epoch in range(args.epochs):
        model.train()
        for batch in train_loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        eval_loss, accuracy, count = evaluate(accelerator, model, eval_loader)
        accelerator.print(f"epoch {epoch}: validation loss {eval_loss:.4f}, accuracy {accuracy:.4f} of {count}")
