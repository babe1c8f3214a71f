"""Trains a Mixtral under DDP with its own balance loss, which each rank computes from its own tokens.

Cause: balance_of_own_tokens
Source: huggingface/transformers #31464 and arXiv 2501.11873: `load_balancing_loss_func` takes the means over the tokens
  of one rank, and the mean over ranks of products of means is not the product of the means.
"""

def main():
    args = arguments(steps=6, batch_size=4, lr=0.001, seed=0)

    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    config = MixtralConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        use_cache=False,
        output_router_logits=True,  # fault
        router_aux_loss_coef=0.05,
    )
    model = DDP(MixtralForCausalLM(config), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    generator = torch.Generator().manual_seed(args.seed)
    text = torch.randint(48, (64, 12), generator=generator)
    sampler = DistributedSampler(text, seed=args.seed)
    loader = DataLoader(text, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    for _, words in zip(range(args.steps), loader):
        optimizer.zero_grad()
        model(input_ids=words, labels=words).loss.backward()  # here
        optimizer.step()
    dist.destroy_process_group()
