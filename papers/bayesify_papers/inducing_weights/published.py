"""Numbers that the paper published, in the units of our tables."""

from __future__ import annotations

CIFAR10: dict[str, dict[str, float]] = {
    "deterministic": {"accuracy": 94.72, "nll": 0.43, "ece": 4.46, "brier": 0.10},
    "ensemble_w": {"accuracy": 95.90, "nll": 0.20, "ece": 1.08, "brier": 0.06},
    "ffg_w": {"accuracy": 94.13, "nll": 0.18, "ece": 0.50, "brier": 0.09},
    "ffg_u": {"accuracy": 94.40, "nll": 0.17, "ece": 0.64, "brier": 0.08},
    "ensemble_u": {"accuracy": 94.94, "nll": 0.16, "ece": 0.45, "brier": 0.08},
}
"""Table 5: ResNet-50 on CIFAR-10, M = 64; accuracy and ECE in percent."""

CIFAR10_OOD: dict[str, dict[str, tuple[float, float]]] = {
    "deterministic": {"cifar100": (0.84, 0.80), "svhn": (0.93, 0.85)},
    "ensemble_w": {"cifar100": (0.89, 0.89), "svhn": (0.95, 0.92)},
    "ffg_w": {"cifar100": (0.88, 0.90), "svhn": (0.90, 0.86)},
    "ffg_u": {"cifar100": (0.89, 0.91), "svhn": (0.94, 0.91)},
    "ensemble_u": {"cifar100": (0.90, 0.91), "svhn": (0.93, 0.91)},
}
"""Table 3: AUROC and AUPR by maximum probability, ResNet-50 trained on CIFAR-10."""

CIFAR10_CORRUPTED: dict[str, dict[str, tuple[float, ...]]] = {
    "deterministic": {"accuracy": (87.90, 82.02, 76.31, 68.91, 57.94), "ece": (10.41, 15.58, 20.56, 27.06, 37.26)},
    "ensemble_w": {"accuracy": (89.45, 83.94, 78.40, 71.18, 60.15), "ece": (4.12, 7.01, 10.10, 14.12, 20.48)},
    "ffg_w": {"accuracy": (83.80, 76.22, 69.30, 61.82, 50.72), "ece": (13.05, 12.14, 11.56, 10.77, 10.86)},
    "ffg_u": {"accuracy": (86.90, 80.33, 74.34, 67.23, 57.00), "ece": (2.47, 4.93, 7.77, 11.27, 16.16)},
    "ensemble_u": {"accuracy": (87.35, 80.45, 73.89, 66.52, 54.89), "ece": (2.77, 5.86, 9.06, 12.54, 19.66)},
}
"""Tables 11 and 12: means over the nineteen corruptions at severities 1 to 5, in percent."""

CIFAR10_PRUNED: dict[str, dict[float, dict[str, float]]] = {
    "ffg_w": {
        1.0: {"accuracy": 94.13, "nll": 0.18, "ece": 0.50, "brier": 0.09},
        0.5: {"accuracy": 94.07, "nll": 0.18, "ece": 0.40, "brier": 0.09},
        0.1: {"accuracy": 94.17, "nll": 0.18, "ece": 0.58, "brier": 0.09},
        0.01: {"accuracy": 93.60, "nll": 0.19, "ece": 0.80, "brier": 0.09},
        0.001: {"accuracy": 58.59, "nll": 1.15, "ece": 7.33, "brier": 0.55},
    },
    "ffg_u": {
        1.0: {"accuracy": 94.40, "nll": 0.17, "ece": 0.64, "brier": 0.08},
        0.75: {"accuracy": 94.45, "nll": 0.18, "ece": 2.19, "brier": 0.09},
        0.5: {"accuracy": 94.31, "nll": 0.18, "ece": 2.31, "brier": 0.09},
        0.25: {"accuracy": 93.34, "nll": 0.22, "ece": 4.83, "brier": 0.11},
    },
}
"""Table 7: ResNet-50 on CIFAR-10 by the share of the weights (FFG-W) or of the entries of Z (FFG-U) that is kept, fine-tuned."""

RESNET50_PARAMETERS: dict[str, dict[int, int]] = {
    "ffg_u": {16: 1_384_662, 32: 2_771_446, 64: 5_710_902, 128: 12_253_366, 256: 27_992_502},
    "ensemble_u": {16: 1_426_134, 32: 2_937_334, 64: 6_374_454, 128: 14_907_574, 256: 38_609_334},
}
"""Table 9: parameters of a ResNet-50 for CIFAR-10 by M."""

RESNET50_PRUNED: dict[float, int] = {0.75: 4_408_790, 0.5: 3_106_678, 0.25: 1_804_566}
"""Table 10: parameters of FFG-U with M = 64 by the share of the entries of Z that is kept."""

RESNET50_DETERMINISTIC = 23_520_842
RESNET50_FFG_W = 46_988_564
"""Tables 9 and 10."""
