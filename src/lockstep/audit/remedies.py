"""The faults that an audit can find, each with the rule of correct training that it breaks and a
remedy."""

from __future__ import annotations

from enum import Enum

_EQUIVALENCE = (
    "every step applies the gradient of one loss over one global batch, whatever the number of"
    " processes"
)
_ONCE = "every sample is seen exactly once in an epoch"
_STREAMS = "each sample and each microbatch has random numbers of its own"
_REPLICAS = "all ranks hold the same model"
_NOTHING_LOST = "a resumed run goes on exactly where it was interrupted"


class Cause(Enum):
    def __init__(self, title: str, law: str, remedy: str) -> None:
        """`title` is the fault in a few words, `law` the rule of correct training, and `remedy` a
        few lines to change."""
        self.title, self.law, self.remedy = title, law, remedy

    SAME_SAMPLES = (
        "several ranks train on the same samples",
        _ONCE,
        "give the loader a sampler that splits the data over the ranks:\n"
        "    sampler = DistributedSampler(dataset)\n"
        "    loader = DataLoader(dataset, sampler=sampler, ...)   # and sampler.set_epoch(epoch)"
        " at each epoch\n"
        "an IterableDataset skips the samples of other ranks and workers itself:"
        " itertools.islice(samples, shard, None, shards)",
    )
    SAME_ORDER = (
        "every epoch has the same order",
        "each epoch has an order of its own",
        "call set_epoch before each epoch:\n"
        "    for epoch in range(epochs):\n"
        "        loader.sampler.set_epoch(epoch)",
    )
    SAMPLES_REPEATED = (
        "samples are seen more than once in an epoch",
        _ONCE,
        "an IterableDataset is copied into every loader worker; let each yield its own part:\n"
        "    worker = torch.utils.data.get_worker_info()\n"
        "    yield from itertools.islice(samples, worker.id, None, worker.num_workers)",
    )
    SAMPLES_MISSING = (
        "samples are left out of every epoch",
        _ONCE,
        "split the data so that the parts of all ranks together are the whole:"
        " DistributedSampler(dataset), or indices[rank::world_size]",
    )
    EVALUATION_REPEATS = (
        "the evaluation counts some samples twice",
        "an evaluation counts each sample exactly once",
        "DistributedSampler pads to a multiple of the ranks; give each rank its own part instead,"
        " and add up sums and counts:\n"
        "    part = Subset(dataset, range(rank, len(dataset), world_size))\n"
        "with Accelerate: accelerator.gather_for_metrics instead of accelerator.gather",
    )
    DATASETS_DIFFER = (
        "each rank has another dataset",
        _ONCE,
        "make it, and split it, with a seed that all ranks share, whatever seed they have"
        " otherwise:\n"
        "    shared = torch.Generator().manual_seed(0)\n"
        "    training, held_out = random_split(dataset, lengths, generator=shared)\n"
        "data of each rank's own need no DistributedSampler: RandomSampler reads all of them",
    )
    NOT_REDUCED = (
        "gradients are not reduced",
        _EQUIVALENCE,
        "call the DistributedDataParallel object, not its .module; leave no_sync before the last"
        " microbatch of a step;\n"
        "a loop of your own must reduce every parameter:\n"
        "    for p in model.parameters():\n"
        "        dist.all_reduce(p.grad)\n"
        "        p.grad /= dist.get_world_size()",
    )
    WRONG_SCALE = (
        "the gradient has the wrong scale",
        _EQUIVALENCE,
        "divide a sum over ranks by the number of ranks, and the loss of a microbatch by the"
        " number of microbatches in a step, once each:\n"
        "    (loss / accumulation_steps).backward()\n"
        "a sum over the count of all ranks is multiplied by world_size where DDP divides by it; a"
        " loss over gathered values needs a\n"
        "gather whose backward adds up the gradients of all ranks:\n"
        "    torch.cat(torch.distributed.nn.functional.all_gather(features))",
    )
    REDUCED_EVERY_MICROBATCH = (
        "gradients are reduced in every microbatch, not once a step",
        "the result is right; bytes and time are wasted",
        "keep the reduction for the last microbatch:\n"
        "    with nullcontext() if last else model.no_sync():\n"
        "        loss.backward()\n"
        "with Accelerate: with accelerator.accumulate(model)",
    )
    UNUSED_PARAMETER = (
        "a parameter is used on some ranks only",
        _EQUIVALENCE,
        "DistributedDataParallel(model, find_unused_parameters=True); a loop of your own must"
        " reduce zeros where p.grad is None,\n"
        "on every rank and in one order",
    )
    LOCAL_CLIPPING = (
        "gradients are clipped by the norm of a part of them",
        "clipping uses the norm of the whole reduced gradient",
        "clip after the reduction, and over all shards:"
        " torch.nn.utils.clip_grad_norm_(model.parameters(), ...) under DDP and FSDP2,\n"
        "model.clip_grad_norm_(...) under FSDP1; accelerator.clip_grad_norm_ only if"
        " accelerator.sync_gradients",
    )
    CLIPPED_SCALED = (
        "gradients are clipped while they are multiplied by the loss scale",
        "clipping uses the norm of the whole reduced gradient",
        "unscale first:\n"
        "    scaler.unscale_(optimizer)\n"
        "    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
    )
    STALE_GRADIENTS = (
        "gradients of earlier steps are still in the sum",
        _EQUIVALENCE,
        "clear them after each step: optimizer.zero_grad()",
    )
    MEAN_OF_MEANS = (
        "the loss is a mean of means",
        _EQUIVALENCE,
        "divide the sum by the count of the whole step, not each microbatch by its own:\n    count"
        " = number of targets of this rank's step; dist.all_reduce(count)\n    loss ="
        ' F.cross_entropy(..., reduction="sum") * world_size / count   # DDP divides by world_size',
    )
    EXPERT_GRADIENT_SCALE = (
        "expert gradient N times, or 1/N times",
        _EQUIVALENCE,
        "the backward of all_to_all brings an expert the gradients of all ranks' rows, so its"
        " gradient is a sum over ranks already:\n"
        "divide it by what all other gradients are divided by, and reduce it over ranks with the"
        " same experts alone:\n"
        "    for p in expert_parameters:\n"
        "        p.grad /= dist.get_world_size()   # as DDP does with all others",
    )
    EXPERTS_MIXED = (
        "gradients of different experts are averaged",
        _EQUIVALENCE,
        "reduce experts over the ranks that hold the same experts, never over those that exchange"
        " tokens; keep them out of DDP:\n"
        "    DDP._set_params_and_buffers_to_ignore_for_model(model, expert_names)",
    )
    EXPERT_COPIES_DIFFER = (
        "experts that should be the same differ",
        _REPLICAS,
        "ranks with the same experts must begin with the same values, and sum their gradients:\n"
        "    for p in expert_parameters:\n"
        "        dist.broadcast(p.data, src, group=same_experts)\n"
        "    ...\n"
        "        dist.all_reduce(p.grad, group=same_experts)",
    )
    EXPERTS_ALIKE = (
        "experts of different ranks begin alike",
        "each expert of a model has initial values of its own",
        "draw all experts on every rank with one seed, and keep the rank's own; or draw a rank's"
        " experts with a seed of the rank",
    )
    NORM_WITHOUT_EXPERTS = (
        "the norm leaves out other ranks' experts",
        "clipping uses the norm of the whole reduced gradient",
        "sum the squares of the experts over the ranks that divide them:\n"
        "    square = sum(p.grad.square().sum() for p in expert_parameters)\n"
        "    dist.all_reduce(square, group=expert_group)\n"
        "    norm = (square + sum(p.grad.square().sum() for p in other_parameters)).sqrt()\n"
        "    torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)",
    )
    ROUTER_WITHOUT_GRADIENT = (
        "a router gets no gradient",
        "the optimizer updates the parameters that the model uses",
        "multiply the experts' outputs by the router's weights, not by detached ones, and not by"
        " weights of a single expert that are normalized to 1:\n"
        "    weights, index = logits.softmax(-1).topk(k)\n"
        "    output = output + weights[rows, choice, None] * expert(tokens[rows])",
    )
    BALANCE_OF_OWN_TOKENS = (
        "a balance loss looks at a rank's own tokens",
        _EQUIVALENCE,
        "the mean over ranks of products of means is not the product of the means: sum the loads"
        " first, they need no gradient:\n"
        "    load = F.one_hot(index, experts).float().mean((0, 1))\n"
        "    dist.all_reduce(load, op=dist.ReduceOp.AVG)   # with equal numbers of tokens\n"
        "    loss = loss + coefficient * experts * (load * logits.softmax(-1).mean(0)).sum()",
    )
    DOCUMENTS_LEAK = (
        "documents in one row attend to each other",
        "a packed document trains as it would alone",
        "call the model with position_ids that restart at each document, without an attention_mask,"
        " and with use_cache=False:\n"
        "    model(input_ids=..., position_ids=..., use_cache=False)\n"
        "models that pass no positions to their masks (GPT-OSS) need flash attention, or"
        " lockstep's Recipe(sequence=ls.Sequence(documents=...)); or give a row to each document",
    )
    INITIAL_VALUES_DIFFER = (
        "ranks begin with different parameters",
        _REPLICAS,
        "wrap the model in DistributedDataParallel, which sends rank 0's values to all, or do so"
        " yourself:\n"
        "    for tensor in model.state_dict().values():\n"
        "        dist.broadcast(tensor, src=0)",
    )
    REPLICAS_DRIFT = (
        "the parameters of the ranks drift apart",
        _REPLICAS,
        "every rank must apply the same gradient with the same settings in the same steps; nothing"
        " but the optimizer may change parameters",
    )
    BUFFERS_DIFFER = (
        "buffers differ from rank to rank",
        _REPLICAS,
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) on GPUs;"
        " DistributedDataParallel(model, broadcast_buffers=True);\n"
        "or average the running statistics over the ranks before each evaluation and save",
    )
    OPTIMIZER_STATE_DIFFERS = (
        "the state of the optimizer differs from rank to rank",
        _REPLICAS,
        "every rank must take the same optimizer steps, and load the same optimizer state",
    )
    OPTIMIZER_NEEDS_WHOLE_TENSORS = (
        "the optimizer needs whole tensors, and is given shards",
        "an optimizer does the same on a part as on the whole",
        "use an element-wise optimizer (SGD, Adam, AdamW) for sharded parameters, or gather each"
        " gradient, update whole, and shard again",
    )
    NOT_TRAINED = (
        "parameters of the model are not in the optimizer",
        "the optimizer updates the parameters that the model uses",
        "build the optimizer last: after fully_shard, after a change of layers, after weights are"
        " tied, after moving to a device",
    )
    NOT_FINITE = (
        "the model's parameters are NaN or infinite",
        "a step applies a gradient that is finite, or none",
        "give every parameter a value: after model.to_empty(...) each module's"
        " reset_parameters(), that of the layers too;\n"
        "skip a step whose gradient is not finite, as torch.amp.GradScaler does:\n"
        "    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)\n"
        "    if torch.isfinite(norm):\n"
        "        optimizer.step()",
    )
    SAME_RANDOM_NUMBERS = (
        "all ranks draw the same random numbers",
        _STREAMS,
        "after the model is built, give each rank a seed of its own: torch.manual_seed(seed +"
        " rank)",
    )
    SAME_AUGMENTATION = (
        "augmentation draws the same random numbers for different samples",
        _STREAMS,
        "do not set one seed in every worker or on every rank:\n"
        "    def seed_worker(worker_id):\n"
        "        np.random.seed(torch.initial_seed() % 2**32)\n"
        "and give each rank's loader a generator of its own:"
        " generator=torch.Generator().manual_seed(seed + rank)",
    )
    SEED_RESET = (
        "a seed is set again and again",
        _STREAMS,
        "set the seed once, before the training loop",
    )
    SCHEDULE_SPEED = (
        "the learning rate schedule runs too fast",
        "the learning rate is a function of the optimizer steps",
        "call scheduler.step() once for each optimizer.step(); with Accelerate, a prepared"
        " scheduler steps once per process:\n"
        "count the training steps before accelerator.prepare, or do not prepare the scheduler",
    )
    SCHEDULE_ON_SKIPPED_STEP = (
        "the schedule goes on although the step was skipped",
        "the learning rate is a function of the optimizer steps",
        "step the schedule only if the loss scale did not fall:\n"
        "    scale = scaler.get_scale(); scaler.step(optimizer); scaler.update()\n"
        "    if scaler.get_scale() >= scale: scheduler.step()",
    )
    LEARNING_RATES_DIFFER = (
        "learning rates differ from rank to rank",
        _REPLICAS,
        "compute the learning rate from values that all ranks share; a metric that steers it must"
        " be reduced first",
    )
    COLLECTIVE_MISMATCH = (
        "ranks call different collectives",
        "all ranks call the same collectives in the same order",
        "move the collective out of the branch that only some ranks take",
    )
    UNEVEN_INPUTS = (
        "a rank runs out of batches while others go on",
        "all ranks take the same number of steps",
        "give all ranks the same number of batches: DistributedSampler, drop_last=True, or"
        " torch.distributed.algorithms.Join",
    )
    RANK_LEFT = (
        "a rank ends while the others go on",
        "all ranks take the same number of steps",
        "let no rank leave the loop alone: reduce the condition of an exit, break or return over"
        " all ranks first",
    )
    HANG = (
        "the script hangs",
        "all ranks call the same collectives in the same order",
        "see which rank the others wait for, and why it does not come to the same call",
    )
    EVALUATION_IN_TRAIN_MODE = (
        "the evaluation runs in train mode",
        "dropout and BatchNorm are off in an evaluation",
        "call model.eval() before it, and model.train() after it:\n"
        "    model.eval()\n"
        "    with torch.no_grad():\n"
        "        ...\n"
        "    model.train()\n"
        "functions take the mode themselves: F.dropout(x, p, training=self.training)",
    )
    TRAINING_IN_EVAL_MODE = (
        "the training goes on in eval mode",
        "dropout and BatchNorm are on in training",
        "call model.train() after each evaluation",
    )
    SAVED_BY_EVERY_RANK = (
        "every rank writes the same file",
        "a checkpoint is complete, or it does not exist",
        "write it on one rank:\n    if dist.get_rank() == 0:\n        torch.save(...)",
    )
    RESUME_DATA = (
        "a resumed run sees other samples than the run without interruption",
        _NOTHING_LOST,
        "save the epoch and the position in it; on resume call sampler.set_epoch(epoch) and skip"
        " the batches that were done",
    )
    RESUME_RANDOM = (
        "a resumed run draws other random numbers",
        _NOTHING_LOST,
        "save each rank's torch.get_rng_state(), and that of its device, and set them on resume",
    )
    RESUME_SCHEDULE = (
        "a resumed run has another learning rate",
        _NOTHING_LOST,
        "save scheduler.state_dict(), and load it on resume",
    )
    RESUME_OPTIMIZER = (
        "a resumed run begins with another optimizer state",
        _NOTHING_LOST,
        "save optimizer.state_dict(), and load it on resume",
    )
    RESUME_MODEL = (
        "a resumed run begins with other parameters",
        _NOTHING_LOST,
        "save model.state_dict() after the optimizer step, and load it before the model is wrapped",
    )
    DEPENDS_ON_PROCESSES = (
        "what is learned depends on the number of processes",
        _EQUIVALENCE,
        "fix the other findings first; then look at what the script computes from the rank or the"
        " number of processes:\nlearning rate, batch, seeds, the order of the data",
    )
