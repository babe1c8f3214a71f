"""Trains a backbone and a head, each in its own DDP; the head is called by its `.module`, which goes around DDP.

Cause: not_reduced
Source: moojink/openvla-oft #160: the action head is wrapped in DDP, but the training step calls a method of
  `action_head.module`, so each rank trains a head of its own on its own batches, and the heads drift apart.
"""

class Trajectories(Dataset):
    """Observations, and the actions of an expert."""

    def __init__(self, seed, size=96, observation=14, action=3):
        generator = torch.Generator().manual_seed(seed)
        self.observations = torch.randn(size, observation, generator=generator)
        expert = torch.randn(observation, action, generator=generator) / observation**0.5
        self.actions = torch.tanh(self.observations @ expert)

    def __len__(self):
        return len(self.observations)

    def __getitem__(self, index):
        return self.observations[index], self.actions[index]


class Backbone(nn.Module):
    def __init__(self, observation=14, width=20):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(observation, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, observations):
        return self.net(observations)


class ActionHead(nn.Module):
    def __init__(self, width=20, action=3):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, action)

    def predict_action(self, hidden):
        return self.out(self.norm(hidden))

    def forward(self, hidden):
        return self.predict_action(hidden)


def main():
    parser = argparse.ArgumentParser(description="fine-tunes a policy")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)

    backbone = DDP(Backbone())
    action_head = DDP(ActionHead())  # here
    parameters = [*backbone.parameters(), *action_head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=args.lr)

    dataset = Trajectories(args.seed)
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for observations, actions in loader:
            hidden = backbone(observations)
            predicted = action_head.module.predict_action(hidden)  # fault
            predicted = action_head(hidden)  # clean
            loss = nn.functional.l1_loss(predicted, actions)
            optimizer.zero_grad()
            loss.backward()  # here
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: L1 loss {loss.item():.4f}")

    dist.destroy_process_group()
