"""The families of models that are trained as an oracle."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from model_steps import Family
from torch import nn
from torch.nn import functional


def transformers() -> Family:
    import small_configs
    import transformers as library
    library.logging.set_verbosity_error()
    return Family(small_configs.architectures(), small_configs.attempts, small_configs.inputs)


class Named(nn.Module):
    """A model of images whose input is called x."""

    def __init__(self, model: nn.Module, size: int | None = None) -> None:
        super().__init__()
        self.model, self.size = model, size          # of the images it is built for

    def forward(self, x: torch.Tensor) -> Any:
        return self.model(x)


TORCHVISION = {  # a small one of each kind of model -> the size of its inputs
    "alexnet": [64], "convnext_tiny": [32], "densenet121": [32], "efficientnet_b0": [32], "efficientnet_v2_s": [32],
    "googlenet": [64], "inception_v3": [96], "maxvit": [64], "mnasnet0_5": [32], "mobilenet_v2": [32],
    "mobilenet_v3_small": [32], "regnet_x_400mf": [64], "regnet_y_400mf": [64], "resnet18": [32],
    "resnext50_32x4d": [32], "shufflenet_v2_x0_5": [32], "squeezenet1_0": [32], "swin_t": [32], "swin_v2_t": [32],
    "vgg11_bn": [32], "vit_b_16": [32], "wide_resnet50_2": [32], "fcn_resnet50": [32],
    "deeplabv3_mobilenet_v3_large": [32], "lraspp_mobilenet_v3_large": [32], "r3d_18": [4, 32], "swin3d_t": [4, 32],
    "mvit_v1": [4, 32], "mvit_v2": [4, 32]}


def torchvision() -> Family:
    from torchvision import models
    from torchvision.models import video

    def build(name: str) -> nn.Module:
        model: nn.Module
        if name == "maxvit":
            model = models.MaxVit((64, 64), 16, 2, [16, 32], [1, 1], 8, 0.0)
        elif name.startswith("mvit"):
            model = small_mvit(second=name == "mvit_v2")
        elif name in ("fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"):
            model = models.get_model(name, weights=None, weights_backbone=None)
        else:
            more = {"vit_b_16": {"image_size": 32}, "inception_v3": {"aux_logits": False}}.get(name, {})
            model = models.get_model(name, weights=None, **more)
        model.of_input = TORCHVISION[name]           # type: ignore[assignment]
        return Named(model)

    def small_mvit(second: bool) -> nn.Module:
        """Two blocks of the first or the second version; the library's own are for videos of 16 x 224 x 224."""
        kernel = {"kernel_q": [3, 3, 3], "kernel_kv": [3, 3, 3]}
        blocks = [video.mvit.MSBlockConfig(1, 16, 16, **kernel, stride_q=[1, 1, 1], stride_kv=[1, 2, 2]),
                  video.mvit.MSBlockConfig(2, 16, 32, **kernel, stride_q=[1, 2, 2], stride_kv=[1, 1, 1])]
        return video.MViT((32, 32), 4, blocks, residual_pool=second, residual_with_cls_embed=not second,
                          rel_pos_embed=second, proj_after_attn=second, num_classes=7)

    def inputs(model: nn.Module, n: int, seed: int) -> dict[str, Any]:
        size: Any = model.model.of_input             # type: ignore[union-attr]
        return {"x": torch.randn(n, 3, *size, size[-1], generator=torch.Generator().manual_seed(seed))}

    return Family(list(TORCHVISION), lambda name: iter([(name, lambda: build(name))]), inputs)


def timm() -> Family:
    import timm as t

    def attempts(name: str) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
        for entry in candidates(name):
            for more in ({"img_size": 64}, {}):
                yield f"{entry} {more}", lambda entry=entry, more=more: build(entry, more)

    def candidates(family: str) -> list[str]:
        own = [n for n in t.list_models() if t.models.model_entrypoint(n).__module__.rpartition(".")[2] == family]
        small = "test_", "pico", "atto", "femto", "nano", "_xxs", "_xs", "xxt", "tiny", "mini", "small", "_s", "18"
        return sorted(own, key=lambda n: next((i for i, part in enumerate(small) if part in n), len(small)))[:2]

    def build(entry: str, more: dict[str, Any]) -> nn.Module:
        with torch.device("meta"):
            count = sum(p.numel() for p in t.create_model(entry, num_classes=7, **more).parameters())
        if count > 35_000_000:
            raise ValueError(f"{count:,} parameters")
        return Named(t.create_model(entry, num_classes=7, **more), more.get("img_size"))

    def inputs(model: nn.Module, n: int, seed: int) -> dict[str, Any]:
        cfg: Any = model.model.default_cfg           # type: ignore[union-attr]
        fixed = getattr(getattr(model.model, "patch_embed", None), "img_size", None)
        if isinstance(fixed, (tuple, list)):
            fixed = fixed[0]
        size: Any = model.size or fixed or (cfg["input_size"][-1] if cfg.get("fixed_input_size") else 64)
        return {"x": torch.randn(n, cfg["input_size"][0], size, size,
                                 generator=torch.Generator().manual_seed(seed))}

    families = sorted({t.models.model_entrypoint(n).__module__.rpartition(".")[2] for n in t.list_models()})
    return Family(families, attempts, inputs)


def diffusers() -> Family:
    import diffusers as d

    def unet2d() -> nn.Module:
        return d.UNet2DModel(sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, norm_num_groups=4,
                             block_out_channels=(8, 16), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                             up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4)

    def unet_conditional() -> nn.Module:
        return d.UNet2DConditionModel(sample_size=16, in_channels=4, out_channels=4, layers_per_block=1,
                                      norm_num_groups=4, block_out_channels=(8, 16), cross_attention_dim=12,
                                      down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
                                      up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=4)

    def dit() -> nn.Module:
        return d.DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2,
                                       sample_size=16, patch_size=2, num_embeds_ada_norm=10, norm_num_groups=4)

    def sd3() -> nn.Module:
        return d.SD3Transformer2DModel(sample_size=16, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8,
                                       num_attention_heads=2, joint_attention_dim=12, caption_projection_dim=16,
                                       pooled_projection_dim=20, out_channels=4, pos_embed_max_size=16)

    def flux() -> nn.Module:
        return d.FluxTransformer2DModel(patch_size=1, in_channels=4, num_layers=1, num_single_layers=1,
                                        attention_head_dim=16, num_attention_heads=2, joint_attention_dim=12,
                                        pooled_projection_dim=20, axes_dims_rope=(4, 4, 8))

    def pixart() -> nn.Module:
        return d.PixArtTransformer2DModel(num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8,
                                          num_layers=2, cross_attention_dim=16, sample_size=16, caption_channels=12,
                                          norm_num_groups=4)

    def vae() -> nn.Module:
        return d.AutoencoderKL(in_channels=3, out_channels=3, block_out_channels=(8, 16), norm_num_groups=4,
                               down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2)

    def vq() -> nn.Module:
        return d.VQModel(in_channels=3, out_channels=3, block_out_channels=(8, 16), norm_num_groups=4,
                         down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2)

    def controlnet() -> nn.Module:
        return d.ControlNetModel(in_channels=4, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
                                 cross_attention_dim=12, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
                                 attention_head_dim=4, conditioning_embedding_out_channels=(8, 16))

    table = {f.__name__: f for f in (unet2d, unet_conditional, dit, sd3, flux, pixart, vae, vq, controlnet)}

    def inputs(model: nn.Module, n: int, seed: int) -> dict[str, Any]:
        g = torch.Generator().manual_seed(seed)
        name, step = type(model).__name__, torch.randint(0, 100, (n,), generator=g)

        def r(*shape: int) -> torch.Tensor:
            return torch.randn(n, *shape, generator=g)

        return {
            "UNet2DModel": lambda: {"sample": r(3, 16, 16), "timestep": step},
            "UNet2DConditionModel": lambda: {"sample": r(4, 16, 16), "timestep": step,
                                             "encoder_hidden_states": r(5, 12)},
            "DiTTransformer2DModel": lambda: {"hidden_states": r(4, 16, 16), "timestep": step,
                                              "class_labels": torch.randint(0, 10, (n,), generator=g)},
            "SD3Transformer2DModel": lambda: {"hidden_states": r(4, 16, 16), "encoder_hidden_states": r(5, 12),
                                              "pooled_projections": r(20), "timestep": step},
            "FluxTransformer2DModel": lambda: {"hidden_states": r(16, 4), "encoder_hidden_states": r(5, 12),
                                               "pooled_projections": r(20), "timestep": step / 100,
                                               "img_ids": torch.randn(16, 3, generator=g),
                                               "txt_ids": torch.randn(5, 3, generator=g)},
            "PixArtTransformer2DModel": lambda: {"hidden_states": r(4, 16, 16), "encoder_hidden_states": r(5, 12),
                                                 "timestep": step,
                                                 "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
            "AutoencoderKL": lambda: {"sample": r(3, 16, 16)}, "VQModel": lambda: {"sample": r(3, 16, 16)},
            "ControlNetModel": lambda: {"sample": r(4, 8, 8), "timestep": step, "encoder_hidden_states": r(5, 12),
                                        "controlnet_cond": r(3, 16, 16)},
        }[name]()

    def attempts(name: str) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
        yield name, table[name]

    return Family(list(table), attempts, inputs)


class LanguageModel(nn.Module):
    """An LSTM over words, that predicts the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm, self.head = nn.Embedding(20, 8), nn.LSTM(8, 8, 2, batch_first=True), nn.Linear(8, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        predicted = self.head(self.lstm(self.words(x))[0])
        return functional.cross_entropy(predicted[:, :-1].flatten(0, 1), x[:, 1:].flatten())


class Gan(nn.Module):
    """A generator and a discriminator with a gradient penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(6, 8, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh())
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(8 * 16, 1))

    def forward(self, real: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        fake = self.generator(noise)
        between = (0.3 * real + 0.7 * fake.detach()).requires_grad_()
        slope, = torch.autograd.grad(self.discriminator(between).sum(), between, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        return self.discriminator(fake).mean() - self.discriminator(real).mean() + penalty


class Experts(nn.Module):
    """A mixture of experts: each token goes to the two that its router prefers."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        out = torch.zeros_like(tokens)
        for k, expert in enumerate(self.experts):
            weight = (weights * (chosen == k)).sum(-1, keepdim=True)
            out = out + weight * expert(tokens)
        return out.view(x.shape)


def handwritten() -> Family:
    kinds = {"LSTM": LanguageModel, "GAN": Gan, "experts": Experts}

    def inputs(model: nn.Module, n: int, seed: int) -> dict[str, Any]:
        g = torch.Generator().manual_seed(seed)
        if isinstance(model, LanguageModel):
            return {"x": torch.randint(0, 20, (n, 6), generator=g)}
        if isinstance(model, Gan):
            return {"real": torch.randn(n, 3, 8, 8, generator=g), "noise": torch.randn(n, 6, 1, 1, generator=g)}
        return {"x": torch.randn(n, 5, 8, generator=g)}

    return Family(list(kinds), lambda name: iter([(name, kinds[name])]), inputs)


FAMILIES: dict[str, Callable[[], Family]] = {"handwritten": handwritten, "transformers": transformers,
                                             "torchvision": torchvision, "timm": timm, "diffusers": diffusers}
