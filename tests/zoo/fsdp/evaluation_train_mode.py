"""Trains a classifier with dropout under FSDP2 and evaluates it without model.eval(): dropout is in the metric.

Cause: evaluation_in_train_mode
Source: meta-pytorch/torchtune #1049 (a recipe evaluated without eval(), unseen because no model had dropout) and
  wolny/pytorch-3dunet #53: torch.no_grad() alone does not turn dropout off.
"""

def make_dataset(seed, size=144, features=8):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, features, generator=generator)
    return TensorDataset(inputs, (inputs[:, :4].sum(dim=1) + inputs[:, 4].square() > 1).long())


class Block(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


def build_model(mesh, width=16, dropout=0.2):
    model = nn.Sequential(nn.Linear(8, width), Block(width, dropout), Block(width, dropout), nn.Linear(width, 2))
    for module in model:
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@torch.no_grad()
def evaluate(model, loader):  # here
    model.eval()  # clean
    sums = torch.zeros(2)
    for inputs, labels in loader:
        logits = model(inputs)  # here
        sums += torch.tensor([F.cross_entropy(logits, labels, reduction="sum").item(), len(labels)])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main():
    args = arguments(epochs=3, batch_size=8, lr=0.01, seed=0)

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(args.seed)

    dataset = make_dataset(args.seed)
    train_set, test_set = Subset(dataset, range(96)), Subset(dataset, range(96, 144))
    sampler = DistributedSampler(train_set, seed=args.seed)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world_size)), batch_size=args.batch_size)

    model = build_model(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    torch.manual_seed(args.seed + rank)

    for epoch in range(args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        for inputs, labels in train_loader:
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        test_loss = evaluate(model, test_loader)  # here
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, test loss {test_loss:.4f}")

    dist.barrier()
    dist.destroy_process_group()
