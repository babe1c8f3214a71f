"""Trains a mixture of experts whose experts the ranks divide among them, with all_to_all written by hand.

Faults: gradient = expert_gradient_scale, twice = expert_gradient_scale, mixed = experts_mixed,
  alike = experts_alike, norm = norm_without_experts, own = norm_without_experts,
  dense = norm_without_experts, router = router_without_gradient,
  balance = balance_of_own_tokens
Source: pytorch/pytorch #160285 (expert gradients times the ranks), NVIDIA/Megatron-LM #5916 and microsoft/DeepSpeed
  #8478 (norms without other ranks' experts), NVIDIA-NeMo/Automodel #1412 (balance losses by rank), and the habit to
  wrap all parameters in one reduction.
"""

class AllToAll(torch.autograd.Function):
    """Sends rows to other ranks, and their gradients back."""

    @staticmethod
    def forward(context, rows, received, sent):
        context.counts = sent, received
        output = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(output, rows.contiguous(), received, sent)
        return output

    @staticmethod
    def backward(context, gradient):
        return AllToAll.apply(gradient, *context.counts), None, None


class MixtureOfExperts(nn.Module):
    """Each rank holds some of the experts. Each token goes to two of them."""

    def __init__(self, features, hidden, experts):
        super().__init__()
        self.count, self.ranks = experts, dist.get_world_size()
        self.router = nn.Linear(features, experts, bias=False)
        up, down = torch.randn(experts, features, hidden), torch.randn(experts, hidden, features)
        own = slice(dist.get_rank() * experts // self.ranks, (dist.get_rank() + 1) * experts // self.ranks)  # clean alike
        own = slice(0, experts // self.ranks)  # fault alike
        self.expert_up = nn.Parameter(up[own] / features**0.5)  # here alike
        self.expert_down = nn.Parameter(down[own] / hidden**0.5)  # here alike
        self.balance = None

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        weights, index = scores.topk(2)
        load = F.one_hot(index, self.count).float().mean((0, 1))
        dist.all_reduce(load)  # clean balance
        load /= self.ranks  # clean balance
        self.balance = self.count * (load * scores.mean(0)).sum()  # here balance
        self.balance = torch.zeros(())  # fault router

        order = index.flatten().argsort(stable=True)
        counts = torch.bincount(index.flatten(), minlength=self.count)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sent, received = (each.view(self.ranks, -1).sum(1).tolist() for each in (counts, theirs))

        rows = AllToAll.apply(x[order // 2], received, sent)
        expert = torch.arange(len(self.expert_up)).repeat(self.ranks).repeat_interleave(theirs)
        hidden = torch.einsum("rf,rfh->rh", rows, self.expert_up[expert]).relu()
        rows = torch.einsum("rh,rhf->rf", hidden, self.expert_down[expert])
        rows = AllToAll.apply(rows, sent, received)

        output = torch.zeros(len(order), x.shape[1]).index_copy(0, order, rows).view(len(x), 2, -1)
        weights = weights.detach()  # fault router
        return x + (output * weights[..., None]).sum(1)


def is_expert(name):
    return "expert_" in name


def reduce_gradients(model):
    """Averages the gradients over the ranks. An expert's has the rows of all ranks already."""
    ranks = dist.get_world_size()
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        is_reduced = not is_expert(name)  # clean mixed
        is_reduced = True  # fault mixed
        if is_reduced:
            dist.all_reduce(parameter.grad)
        parameter.grad /= ranks  # clean gradient
        if not is_expert(name):  # fault gradient
            parameter.grad /= ranks  # fault gradient
        if is_expert(name):  # fault twice
            parameter.grad /= ranks  # fault twice


def clip_gradients(model, max_norm):
    """Scales the gradients so that the norm of the whole gradient is at most max_norm."""
    parts = [(name, each) for name, each in model.named_parameters() if each.grad is not None]
    square = sum(each.grad.square().sum() for name, each in parts if is_expert(name))
    dist.all_reduce(square)  # clean own
    square = torch.zeros(())  # fault dense
    square += sum(each.grad.square().sum() for name, each in parts if not is_expert(name))
    scale = (max_norm / square.sqrt()).clamp(max=1.0)
    for _, each in parts:
        each.grad *= scale


def main():
    args = arguments(epochs=3, batch_size=16, lr=0.2, max_norm=0.2, coefficient=0.05, seed=0)

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Linear(9, 16), MixtureOfExperts(16, 24, 4), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)  # here alike

    generator = torch.Generator().manual_seed(args.seed)
    inputs = torch.randn(96, 9, generator=generator)
    targets = (inputs @ torch.randn(9, 3, generator=generator)).argmax(1)
    dataset = TensorDataset(inputs, targets)
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y) + args.coefficient * model[1].balance
            optimizer.zero_grad()
            loss.backward()  # here gradient, here twice, here mixed, here router, here balance
            reduce_gradients(model)  # here gradient, here twice, here mixed
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)  # fault norm
            clip_gradients(model, args.max_norm)  # clean norm
            optimizer.step()  # here own, here dense
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()
