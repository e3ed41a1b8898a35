"""The residual networks once more, in PyTorch and with torchvision's names."""

import torch
from torch import nn
from torch.nn import functional as F


class Residual(nn.Module):
    """Two 3×3 convolutions, or a bottleneck; `shortcut` is its kernel size, 0 for option A."""

    def __init__(self, channels_in, width, stride, bottleneck, shortcut):
        super().__init__()
        channels_out = 4 * width if bottleneck else width
        if bottleneck:
            self.conv1 = nn.Conv2d(channels_in, width, 1, bias=False)
            self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
            self.conv3 = nn.Conv2d(width, channels_out, 1, bias=False)
            self.bn3 = nn.BatchNorm2d(channels_out)
        else:
            self.conv1 = nn.Conv2d(channels_in, width, 3, stride, 1, bias=False)
            self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.bottleneck = bottleneck
        self.padding = 0
        self.downsample = None
        if stride == 1 and channels_in == channels_out:
            return
        if shortcut == 0:
            self.padding = (channels_out - channels_in) // 2
        else:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, shortcut, stride, shortcut // 2, bias=False),
                nn.BatchNorm2d(channels_out),
            )

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.bottleneck:
            y = self.bn3(self.conv3(F.relu(y)))
        if self.downsample is not None:
            x = self.downsample(x)
        elif self.padding:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.padding, self.padding))
        return F.relu(x + y)


class ResNet(nn.Module):
    """ResNet-18 and -50 without their classifier; ResNet-32 with `small_stem`."""

    def __init__(self, widths, blocks, channels=3, bottleneck=False, small_stem=False, shortcut=1):
        super().__init__()
        size, stride = (3, 1) if small_stem else (7, 2)
        self.conv1 = nn.Conv2d(channels, widths[0], size, stride, size // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.pool = nn.Identity() if small_stem else nn.MaxPool2d(3, 2, 1)
        self.stages = []
        channels = widths[0]
        for number, (width, count) in enumerate(zip(widths, blocks, strict=True), start=1):
            layers = []
            for place in range(count):
                stride = 2 if number > 1 and place == 0 else 1
                layers.append(Residual(channels, width, stride, bottleneck, shortcut))
                channels = 4 * width if bottleneck else width
            self.stages.append(f"layer{number}")
            setattr(self, f"layer{number}", nn.Sequential(*layers))

    def forward(self, x):
        x = self.pool(F.relu(self.bn1(self.conv1(x))))
        for stage in self.stages:
            x = getattr(self, stage)(x)
        return x.mean((2, 3))


class Wide(nn.Module):
    """A block of a wide residual network; the names are those of ours."""

    def __init__(self, channels_in, channels_out, stride):
        super().__init__()
        self.first = nn.ModuleDict(
            {
                "norm": nn.BatchNorm2d(channels_in),
                "conv": nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False),
            }
        )
        self.second = nn.ModuleDict(
            {
                "norm": nn.BatchNorm2d(channels_out),
                "conv": nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False),
            }
        )
        self.shortcut = None
        if channels_in != channels_out:
            self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, x):
        active = F.relu(self.first["norm"](x))
        y = F.relu(self.second["norm"](self.first["conv"](active)))
        return self.second["conv"](y) + (x if self.shortcut is None else self.shortcut(active))


class WideResNet(nn.Module):
    """WRN-d-k without dropout and classifier."""

    def __init__(self, widths, blocks, channels=3):
        super().__init__()
        self.stem = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        layers, channels = [], 16
        for stage, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            for place in range(count):
                layers.append(Wide(channels, width, 2 if stage > 0 and place == 0 else 1))
                channels = width
        self.blocks = nn.Sequential(*layers)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        return F.relu(self.norm(self.blocks(self.stem(x)))).mean((2, 3))


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
        elif name.endswith(("bias", "running_mean")):
            tensor.copy_(0.2 * values)
        else:
            tensor.copy_(1 + 0.2 * values.clamp(-2, 2))
    return module
