"""Trains under DDP with a GradScaler and clips the gradients while they are multiplied by its scale.

Cause: clipped_scaled
Source: pytorch/examples #1196 (the minGPT-ddp trainer) and milesial/Pytorch-UNet #468: clip_grad_norm_ without
  scaler.unscale_ before it, so the bound is `scale` times tighter than it says.
"""

@dataclass
class TrainerConfig:
    max_epochs: int
    batch_size: int
    learning_rate: float
    grad_norm_clip: float
    seed: int


def make_dataset(seed, size=96, features=10):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, features, generator=generator)
    teacher = torch.randn(features, 1, generator=generator) / 2
    return TensorDataset(inputs, inputs @ teacher)


class Trainer:
    def __init__(self, config, model, dataset):
        self.config = config
        self.sampler = DistributedSampler(dataset, seed=config.seed)
        self.loader = DataLoader(dataset, batch_size=config.batch_size, sampler=self.sampler, drop_last=True)
        self.model = DDP(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=config.learning_rate)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def _run_batch(self, source, targets):
        loss = nn.functional.mse_loss(self.model(source), targets)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)  # clean
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)  # here
        self.scaler.step(self.optimizer)  # here
        self.scaler.update()
        return loss.item()

    def train(self):
        for epoch in range(self.config.max_epochs):
            self.sampler.set_epoch(epoch)
            losses = [self._run_batch(source, targets) for source, targets in self.loader]
            print(f"[rank {dist.get_rank()}] epoch {epoch} | train loss {sum(losses) / len(losses):.5f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--grad-norm-clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    config = TrainerConfig(**vars(parser.parse_args()))

    dist.init_process_group("gloo")
    torch.manual_seed(config.seed)
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 1))
    Trainer(config, model, make_dataset(config.seed)).train()
    dist.destroy_process_group()
