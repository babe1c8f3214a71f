"""Trains a small ViT with the Trainer; all processes flip and shift their images alike.

Cause: same_augmentation
Source: huggingface/accelerate issue 236: the Trainer sets numpy's seed to the same number on all processes, and images
are augmented in the process itself (dataloader_num_workers=0) from numpy's global random numbers
"""

SIZE = 16


class Stripes(Dataset):
    """Noisy pictures with stripes of two directions."""

    def __init__(self, count: int, seed: int, augment: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(2, (count,), generator=generator)
        phase = 6 * torch.rand(count, 1, 1, generator=generator)
        stripes = torch.sin(phase + 0.8 * torch.arange(SIZE)).expand(count, SIZE, SIZE)
        stripes = torch.where(self.labels[:, None, None] == 1, stripes, stripes.transpose(1, 2))
        self.pictures = stripes + 0.5 * torch.randn(count, SIZE, SIZE, generator=generator)
        self.augment = augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        picture = self.pictures[index]
        if self.augment:
            if np.random.rand() < 0.5:  # here
                picture = picture.flip(1)
            picture = picture.roll(np.random.randint(-3, 4, size=2).tolist(), dims=(0, 1))  # here
        return {"pixel_values": picture[None], "labels": self.labels[index]}


def main() -> None:
    args = arguments(seed=0, epochs=2, lr=2e-3)

    set_seed(args.seed)
    config = ViTConfig(
        image_size=SIZE, patch_size=4, num_channels=1, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    model = ViTForImageClassification(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=8,
            learning_rate=args.lr,
            logging_strategy="epoch",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
            seed=args.seed,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Stripes(128, args.seed, augment=True))
        np.random.seed(args.seed + 1000 * (1 + arguments.process_index))  # clean
        trainer.train()  # here
