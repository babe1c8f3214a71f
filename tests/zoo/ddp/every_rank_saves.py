"""Trains a classifier under DDP; at the end of each epoch every rank writes the same checkpoint file.

Cause: saved_by_every_rank
Source: kakaobrain/scrl #5 (a checkpoint that cannot be read, because all processes wrote it at once) and NVIDIA/apex
  #886 (one writer per machine).
"""

def make_dataset(seed, size=96, features=10):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, features, generator=generator)
    return TensorDataset(inputs, (inputs.square().sum(dim=1) > features).long())


def shared_folder():
    """A new folder, which rank 0 makes."""
    name = [tempfile.mkdtemp(prefix="checkpoints-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name, src=0)
    return Path(name[0])


class Trainer:
    def __init__(self, model, dataset, folder, args):
        self.rank = dist.get_rank()
        self.folder = folder
        self.sampler = DistributedSampler(dataset, seed=args.seed)
        self.loader = DataLoader(dataset, batch_size=args.batch_size, sampler=self.sampler, drop_last=True)
        self.model = DDP(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)

    def _save_checkpoint(self, epoch):
        checkpoint = {"epoch": epoch, "model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(checkpoint, self.folder / "checkpoint.pt")  # here

    def train(self, max_epochs):
        for epoch in range(max_epochs):
            self.sampler.set_epoch(epoch)
            for inputs, targets in self.loader:
                loss = F.cross_entropy(self.model(inputs), targets)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            self._save_checkpoint(epoch)  # fault
            if self.rank == 0:
                self._save_checkpoint(epoch)  # clean
                print(f"epoch {epoch}: loss {loss.item():.4f}, saved")


def main():
    args = arguments(epochs=3, batch_size=8, lr=0.01, seed=0)

    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    folder = shared_folder()
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
    Trainer(model, make_dataset(args.seed), folder, args).train(args.epochs)

    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.destroy_process_group()
