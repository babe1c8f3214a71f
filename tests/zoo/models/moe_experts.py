"""Trains a mixture of experts: an expert that a rank did not use keeps no gradient there, and the replicas drift apart.

Cause: unused_parameter
Source: microsoft/DeepSpeed #291: with sparse routing a parameter has a gradient on some ranks and None on others, and
    a reduction by hand that skips None treats the ranks unequally.
"""

class MixtureOfExperts(nn.Module):
    """Sends each sample to the expert that its router prefers; experts without samples are skipped."""

    def __init__(self, features, hidden, experts, classes):
        super().__init__()
        self.router = nn.Linear(features, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(features, hidden), nn.GELU(), nn.Linear(hidden, features)) for _ in range(experts)
        )
        self.head = nn.Linear(features, classes)

    def forward(self, x):
        gate, choice = self.router(x).softmax(-1).max(-1)
        mixed = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            routed = torch.nonzero(choice == index).flatten()
            if len(routed):
                mixed = mixed.index_add(0, routed, gate[routed, None] * expert(x[routed]))
        return self.head(x + mixed)


def average_gradients(parameters):
    """One all-reduce for all gradients; an unused expert contributes zeros."""
    parameters = list(parameters)
    flat = torch.cat([(torch.zeros_like(each) if each.grad is None else each.grad).flatten() for each in parameters])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for parameter, part in zip(parameters, flat.split([each.numel() for each in parameters]), strict=True):
        if parameter.grad is None:  # fault
            continue  # fault
        parameter.grad = part.view_as(parameter)  # here


def main():
    args = arguments(seed=0, epochs=2, batch_size=4, experts=4, lr=0.05)

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    model = MixtureOfExperts(features=12, hidden=24, experts=args.experts, classes=3)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    generator = torch.Generator().manual_seed(args.seed)
    x = torch.randn(128, 12, generator=generator)
    labels = torch.sin(2 * x @ torch.randn(12, 3, generator=generator)).argmax(1)
    dataset = TensorDataset(x, labels)
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            average_gradients(model.parameters())  # here
            optimizer.step()  # here
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()
