"""The backbones once more, in PyTorch and with torchvision's names."""

from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional as F


def conv(channels_in, channels_out, size=3, stride=1):
    return nn.Conv2d(channels_in, channels_out, size, stride, size // 2, bias=False)


class Residual(nn.Module):
    """Two 3×3 convolutions, or a bottleneck; `shortcut` is its kernel size, 0 for option A."""

    def __init__(self, channels_in, width, stride, bottleneck, shortcut):
        super().__init__()
        self.channels_out = 4 * width if bottleneck else width
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.conv1, self.conv2 = conv(channels_in, width, 3, stride), conv(width, width)
        self.conv3 = self.downsample = None
        if bottleneck:
            self.conv1, self.conv2 = conv(channels_in, width, 1), conv(width, width, 3, stride)
            self.conv3, self.bn3 = conv(width, 4 * width, 1), nn.BatchNorm2d(4 * width)
        self.padding = (self.channels_out - channels_in) // 2
        if shortcut and (stride > 1 or self.padding):
            layer = conv(channels_in, self.channels_out, shortcut, stride)
            self.downsample = nn.Sequential(layer, nn.BatchNorm2d(self.channels_out))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.conv3 is not None:
            y = self.bn3(self.conv3(F.relu(y)))
        if self.downsample is not None:
            x = self.downsample(x)
        elif self.padding:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.padding, self.padding))
        return F.relu(x + y)


def resnet(widths, blocks, bottleneck=False, small_stem=False, shortcut=1):
    """ResNet-18 and -50 without their classifier; ResNet-32 with `small_stem`."""
    channels, layers = widths[0], OrderedDict()
    layers["conv1"] = conv(3, channels) if small_stem else conv(3, channels, 7, 2)
    layers["bn1"], layers["relu"] = nn.BatchNorm2d(channels), nn.ReLU()
    layers["maxpool"] = nn.Identity() if small_stem else nn.MaxPool2d(3, 2, 1)
    for number, (width, count) in enumerate(zip(widths, blocks, strict=True), start=1):
        layers[f"layer{number}"] = nn.Sequential()
        for place in range(count):
            stride = 2 if number > 1 and place == 0 else 1
            block = Residual(channels, width, stride, bottleneck, shortcut)
            layers[f"layer{number}"].append(block)
            channels = block.channels_out
    return nn.Sequential(OrderedDict(layers, avgpool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten()))


class Wide(nn.Module):
    """A block of a wide residual network; the names are those of ours."""

    def __init__(self, channels_in, channels_out, stride):
        super().__init__()
        first, second = conv(channels_in, channels_out, 3, stride), conv(channels_out, channels_out)
        self.first = nn.ModuleDict({"norm": nn.BatchNorm2d(channels_in), "conv": first})
        self.second = nn.ModuleDict({"norm": nn.BatchNorm2d(channels_out), "conv": second})
        self.shortcut = None
        if channels_in != channels_out:
            self.shortcut = conv(channels_in, channels_out, 1, stride)

    def forward(self, x):
        active = F.relu(self.first["norm"](x))
        y = F.relu(self.second["norm"](self.first["conv"](active)))
        return self.second["conv"](y) + (x if self.shortcut is None else self.shortcut(active))


def wide_resnet(widths, blocks):
    """WRN-d-k without dropout and classifier."""
    layers, channels = nn.Sequential(), 16
    for stage, (width, count) in enumerate(zip(widths, blocks, strict=True)):
        for place in range(count):
            layers.append(Wide(channels, width, 2 if stage > 0 and place == 0 else 1))
            channels = width
    own = {"stem": conv(3, 16), "blocks": layers, "norm": nn.BatchNorm2d(channels)}
    own |= {"relu": nn.ReLU(), "avgpool": nn.AdaptiveAvgPool2d(1), "flat": nn.Flatten()}
    return nn.Sequential(OrderedDict(own))


def conv_norm(channels_in, channels_out, size=3):
    layers = {"conv": conv(channels_in, channels_out, size), "norm": nn.BatchNorm2d(channels_out)}
    return nn.Sequential(OrderedDict(layers))


class Conv4Block(nn.Sequential):
    def __init__(self, channels_in, channels_out):
        layers = OrderedDict(conv_norm(channels_in, channels_out).named_children())
        super().__init__(OrderedDict(layers, relu=nn.ReLU(), pool=nn.MaxPool2d(2)))


class PooledBlock(nn.Module):
    """A block of ResNet-12."""

    def __init__(self, channels_in, channels_out):
        super().__init__()
        self.first = conv_norm(channels_in, channels_out)
        self.second, self.third = (conv_norm(channels_out, channels_out) for _ in range(2))
        self.shortcut = conv_norm(channels_in, channels_out, 1)

    def forward(self, x):
        y = F.leaky_relu(self.second(F.leaky_relu(self.first(x), 0.1)), 0.1)
        return F.max_pool2d(F.leaky_relu(self.third(y) + self.shortcut(x), 0.1), 2)


def pooled(name, block, widths, blocks):
    """Conv4 and ResNet-12, of four blocks that end in max-pooling; the names are those of ours."""
    blocks = (block(*channels) for channels in zip((3, *widths), widths, strict=False))
    layers = {name: nn.Sequential(*blocks), "avgpool": nn.AdaptiveAvgPool2d(1)}
    return nn.Sequential(OrderedDict(layers, flat=nn.Flatten()))


class SwinBlock(nn.Module):
    def __init__(self, dim, shift):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = SwinAttention(dim, shift)
        layers = nn.Linear(dim, 4 * dim), nn.GELU(), nn.Identity(), nn.Linear(4 * dim, dim)
        self.mlp = nn.Sequential(*layers)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class SwinAttention(nn.Module):
    """Attention in windows of 7×7: of all patches at once, where a mask keeps those of a window."""

    def __init__(self, dim, shift):
        super().__init__()
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.relative_position_bias_table = nn.Parameter(torch.zeros(169, dim // 32))
        self.shift = shift

    def forward(self, x):
        n, height, width, dim = x.shape
        padded = F.pad(x, (0, 0, 0, -width % 7, 0, -height % 7))
        # Along each axis, where a patch is in the shifted windows, and if it came back in them.
        shifts = [self.shift if side > 7 else 0 for side in padded.shape[1:3]]
        own = [torch.arange(s) - shift for s, shift in zip(padded.shape[1:3], shifts, strict=True)]
        places = torch.cartesian_prod(*(place % len(place) for place in own))
        parts = torch.cat([places // 7, torch.cartesian_prod(*(place < 0 for place in own))], 1)
        mask = torch.where((parts[:, None] == parts).all(-1), 0.0, -torch.inf)
        dy, dx = (places[:, None] % 7 - places % 7 + 6).unbind(-1)
        bias = self.relative_position_bias_table[13 * dy + dx].permute(2, 0, 1)
        qkv = self.qkv(padded.reshape(n, -1, dim))
        q, k, v = (t.reshape(n, -1, dim // 32, 32).transpose(1, 2) for t in qkv.chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias + mask)
        y = self.proj(y.transpose(1, 2).reshape(padded.shape))
        return y[:, :height, :width]


class SwinMerge(nn.Module):
    """2×2 neighbours become one vector."""

    def __init__(self, dim, dim_out):
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim)
        self.reduction = nn.Linear(4 * dim, dim_out, bias=False)

    def forward(self, x):
        x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
        parts = [x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]]
        return self.reduction(self.norm(torch.cat(parts, -1)))


class ChannelsLast(nn.Module):
    def forward(self, x):
        return x.permute(0, 2, 3, 1)


class Swin(nn.Module):
    """Swin without its classifier and without stochastic depth."""

    def __init__(self, widths, blocks):
        super().__init__()
        patch = nn.Conv2d(3, widths[0], 4, 4)
        layers: list[nn.Module] = [nn.Sequential(patch, ChannelsLast(), nn.LayerNorm(widths[0]))]
        for stage, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            if stage > 0:
                layers.append(SwinMerge(widths[stage - 1], width))
            layers.append(nn.Sequential(*(SwinBlock(width, 3 * (i % 2)) for i in range(count))))
        self.features = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(widths[-1])

    def forward(self, x):
        return self.norm(self.features(x)).mean((1, 2))


@torch.no_grad()
def randomize(module, seed=0):
    """Random values in every parameter and statistic, none of them as it begins."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in module.state_dict().items():
        if not tensor.is_floating_point():
            continue
        values = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim == 4:
            tensor.copy_(values * (2 / tensor[0].numel()) ** 0.5)
        elif tensor.ndim == 2:
            tensor.copy_(values * tensor.shape[1] ** -0.5)
        elif name.endswith(("bias", "running_mean")):
            tensor.copy_(0.2 * values)
        else:
            tensor.copy_(1 + 0.2 * values.clamp(-2, 2))
    return module
