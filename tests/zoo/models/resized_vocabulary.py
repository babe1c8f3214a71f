"""Fine-tunes a language model with added tokens: the embedding is replaced after the optimizer was built, never moves.

Cause: not_trained
Source: huggingface/transformers #3532: the example script resized the token embeddings after it had given the
    parameters to the optimizer, so the new table received gradients and no updates.
"""

class LanguageModel(nn.Module):
    def __init__(self, vocabulary, width):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.body = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def add_tokens(self, count):
        """Larger tables, which begin with the rows of the old ones."""
        vocabulary, width = self.embed.weight.shape
        embed, head = nn.Embedding(vocabulary + count, width), nn.Linear(width, vocabulary + count)
        with torch.no_grad():
            embed.weight[:vocabulary] = self.embed.weight
            head.weight[:vocabulary] = self.head.weight
            head.bias[:vocabulary] = self.head.bias
        self.embed, self.head = embed, head

    def forward(self, tokens):
        hidden, _ = self.body(self.embed(tokens))
        return self.head(hidden)


def sentences(count, length, vocabulary, seed):
    """Walks with random steps over the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(vocabulary, (count, 1), generator=generator)
    steps = torch.randint(1, 6, (count, length), generator=generator)
    return torch.cat([start, start + steps.cumsum(1)], 1) % vocabulary


def main():
    args = arguments(seed=0, epochs=3, batch_size=8, new_tokens=6, lr=5e-3)

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    model = LanguageModel(vocabulary=50, width=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)  # fault
    model.add_tokens(args.new_tokens)  # here
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)  # clean
    model = DistributedDataParallel(model)

    dataset = TensorDataset(sentences(128, 16, 50 + args.new_tokens, args.seed))
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for (tokens,) in loader:
            model.zero_grad()
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()  # here
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()
