"""Which kernels repeat their bits, on the whole of a tensor and on a part of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from results import CPU, attempt, report
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def kernels() -> None:
    if CPU:
        report("kernels", ok=None, error="needs a GPU")
        return
    for function in (norms, updates, attention, operations, alignment):
        attempt(function.__name__, function)
    report(
        "defaults",
        tf32_matmul=torch.backends.cuda.matmul.allow_tf32,
        tf32_cudnn=torch.backends.cudnn.allow_tf32,
        precision=torch.get_float32_matmul_precision(),
    )


SHAPES = [
    (10, 64),
    (64, 147),
    (100, 512),
    (17, 4096),
    (8, 50304),
    (3, 100000),
    (1024, 4096),
    (128, 16384),
]
SHAPES += [(16, 262144), (4096, 1024)]


def norms() -> None:
    """The clipping norm is summed row by row: a row's sum must not depend on how many rows a rank
    has."""
    from lockstep.training.optim.gradient_norm import squares_of_rows

    torch.manual_seed(0)
    wrong = {}
    for shape in SHAPES:
        full = torch.randn(shape, device="cuda")
        (whole,) = squares_of_rows([full])
        for ranks in (2, 3, 4, 8):
            parts = torch.cat(
                [squares for part in full.chunk(ranks) for squares in squares_of_rows([part])]
            )
            if not torch.equal(whole, parts):
                wrong[f"{shape} over {ranks}"] = int((whole != parts).sum())
    report(
        "row sums of the norm do not depend on the shard",
        ok=not wrong,
        wrong=wrong,
        short=f"{len(wrong)} of 40 differ",
    )


def updates() -> None:
    """Under numerics=bitwise an optimizer updates a part of a tensor as it would update the
    whole."""
    cases = (
        (1000003, (0, 333335, 666670, 1000003)),
        (4096, (0, 1365, 2730, 4096)),
        (65537, (0, 1, 7, 65537)),
    )

    def stepped(value: Tensor, gradient: Tensor, how: str) -> Tensor:
        parameter = torch.nn.Parameter(value.clone())
        optimizer = torch.optim.AdamW([parameter], lr=1e-3, **{how: True})
        for _ in range(3):
            parameter.grad = gradient.clone()
            optimizer.step()
        return parameter.detach()

    for how in ("fused", "foreach"):
        differ = 0
        for size, cuts in cases:
            start, gradient = torch.randn(size, device="cuda"), torch.randn(size, device="cuda")
            parts = [stepped(start[a:b], gradient[a:b], how) for a, b in itertools.pairwise(cuts)]
            differ += int((stepped(start, gradient, how) != torch.cat(parts)).sum())
        what = f"{how} AdamW of a part is that of the whole"
        report(what, ok=differ == 0, differ=differ, short=f"{differ} elements differ")


def repeats(function: Callable[[], Tensor], times: int = 3) -> bool:
    results = []
    for _ in range(times):
        torch.manual_seed(0)
        results.append(function())
    return all(torch.equal(results[0], each) for each in results[1:])


def attention() -> None:
    cases = (
        (SDPBackend.FLASH_ATTENTION, torch.bfloat16),
        (SDPBackend.EFFICIENT_ATTENTION, torch.bfloat16),
        (SDPBackend.EFFICIENT_ATTENTION, torch.float32),
        (SDPBackend.CUDNN_ATTENTION, torch.bfloat16),
        (None, torch.bfloat16),
    )

    def gradients(backend: SDPBackend | None, dtype: torch.dtype) -> Tensor:
        q, k, v = (
            torch.randn(4, 16, 2048, 64, device="cuda", dtype=dtype).requires_grad_()
            for _ in range(3)
        )
        with sdpa_kernel(backend) if backend else torch.enable_grad():
            F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum().backward()
        return torch.cat([each.grad.flatten() for each in (q, k, v)])

    for deterministic in (True, False):
        torch.use_deterministic_algorithms(deterministic)
        for backend, dtype in cases:
            chosen = backend.name if backend else "chosen"
            what = f"attention backward, {chosen}, {str(dtype)[6:]}, deterministic={deterministic}"
            try:
                same = repeats(lambda backend=backend, dtype=dtype: gradients(backend, dtype))
                report(what, ok=same if deterministic else None, same=same)
            except RuntimeError as error:
                report(what, ok=None, error=str(error)[:200])
    torch.use_deterministic_algorithms(False)


def operations() -> None:
    """Which usual operations repeat, with and without deterministic algorithms, and which are
    refused."""
    index = torch.randint(0, 50, (20000,), device="cuda")
    source = torch.randn(20000, 64, device="cuda")
    image = torch.randn(2, 8, 32, 32, device="cuda")

    def embedding() -> Tensor:
        weight = torch.zeros(1000, 64, device="cuda", requires_grad=True)
        F.embedding(index, weight).mul(source).sum().backward()
        return weight.grad

    def gradient(function: Callable[[Tensor], Tensor], given: Tensor) -> Tensor:
        x = given.clone().requires_grad_()
        function(x).square().sum().backward()
        return x.grad

    def sampled(x: Tensor) -> Tensor:
        return F.grid_sample(x, torch.rand(2, 16, 16, 2, device="cuda"), align_corners=False)

    cases: dict[str, Callable[[], Tensor]] = {
        "embedding": embedding,
        "index_add_": lambda: torch.zeros(50, 64, device="cuda").index_add_(0, index, source),
        "scatter_add_": (
            lambda: torch.zeros(50, 64, device="cuda").scatter_add_(
                0, index[:, None].expand(-1, 64), source
            )
        ),
        "index": lambda: gradient(lambda x: x[index[:2000]], source[:50]),
        "cumsum": lambda: source.cumsum(0),
        "cross_entropy": lambda: gradient(lambda x: F.cross_entropy(x, index % 64), source),
        "interpolate, bilinear": lambda: gradient(
            lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), image
        ),
        "adaptive_avg_pool2d": lambda: gradient(lambda x: F.adaptive_avg_pool2d(x, 7), image),
        "max_pool2d": lambda: gradient(lambda x: F.max_pool2d(x, 3, 2), image),
        "grid_sample": lambda: gradient(sampled, image),
        "conv2d": lambda: gradient(torch.nn.Conv2d(8, 8, 3, device="cuda"), image),
        "layer_norm": lambda: gradient(torch.nn.LayerNorm(64, device="cuda"), source),
        "bincount": lambda: torch.bincount(index, weights=source[:, 0]),
        "sort": lambda: source.sort(0).values,
    }
    for deterministic in (True, False):
        torch.use_deterministic_algorithms(deterministic)
        found = {}
        for name, operation in cases.items():
            try:
                found[name] = "repeats" if repeats(operation) else "DIFFERS"
            except RuntimeError as error:
                found[name] = "refused: " + str(error)[:80]
        report(
            f"operations, deterministic={deterministic}",
            ok="DIFFERS" not in found.values() if deterministic else None,
            found=found,
            short=", ".join(
                f"{name}: {value[:8]}" for name, value in found.items() if value != "repeats"
            ),
        )
    torch.use_deterministic_algorithms(False)


def alignment() -> None:
    """A product may depend on where its operands are in memory."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for m, k, n in ((1024, 256, 1024), (1024, 1000, 512), (4096, 768, 3072)):
            x, w, b = (
                torch.randn(*shape, device="cuda", dtype=dtype) for shape in ((m, k), (n, k), (n,))
            )
            plain = F.linear(x, w, b)
            for shift in (1, 4, 8):
                moved = (
                    torch.empty(w.numel() + shift, device="cuda", dtype=dtype)[shift:]
                    .view(n, k)
                    .copy_(w)
                )
                found[f"{str(dtype)[6:]} {m}x{k}x{n}, moved by {shift}"] = torch.equal(
                    plain, F.linear(x, moved, b)
                )
    off = [name for name, same in found.items() if not same]
    report(
        "products do not depend on alignment",
        ok=None,
        differ=off,
        short=f"{len(off)} of {len(found)} differ",
    )
