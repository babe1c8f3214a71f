"""Trains a regression with dropout under DDP; validation leaves the model in evaluation mode for the rest of training.

Cause: training_in_eval_mode
Source: pytorch/ignite #746 (model.train() stands before the loop, validation calls model.eval()), hendrycks/ethics #5
  and huggingface/lerobot #3668: after the first validation there is no dropout any more.
"""

def make_dataset(seed, size, features=9):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, features, generator=generator)
    return TensorDataset(inputs, torch.sin(inputs.sum(dim=1, keepdim=True)) + inputs[:, :1])


class Regressor(nn.Module):
    def __init__(self, features=9, hidden=40, dropout=0.25):
        super().__init__()
        self.fc1 = nn.Linear(features, hidden)
        self.dropout = nn.Dropout(dropout)
        self.fc2 = nn.Linear(hidden, 1)

    def forward(self, x):
        return self.fc2(self.dropout(torch.relu(self.fc1(x))))


def validate(model, loader):
    model.eval()  # here
    total = torch.zeros(2)
    with torch.no_grad():
        for inputs, targets in loader:
            total[0] += nn.functional.mse_loss(model(inputs), targets, reduction="sum")
            total[1] += len(targets)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main():
    args = arguments(epochs=3, batch_size=8, lr=0.005, seed=0)

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    train_set, validation_set = make_dataset(args.seed, 96), make_dataset(args.seed + 10_000, 48)
    sampler = DistributedSampler(train_set, seed=args.seed)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    validation_loader = DataLoader(Subset(validation_set, range(rank, len(validation_set), world_size)), batch_size=args.batch_size)

    model = DDP(Regressor())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    torch.manual_seed(args.seed + rank)

    model.train()  # fault
    for epoch in range(args.epochs):
        model.train()  # clean
        sampler.set_epoch(epoch)
        for inputs, targets in train_loader:
            loss = nn.functional.mse_loss(model(inputs), targets)  # here
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        validation_loss = validate(model, validation_loader)  # here
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, validation loss {validation_loss:.4f}")

    dist.barrier()
    dist.destroy_process_group()
