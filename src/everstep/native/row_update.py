"""Does to one row, in NumPy, what an optimizer does: the plain form of the kernels in native/rows.inc, equal bit for
bit.

A member of a group steps a few rows of its own with it (``api/group_tables.py``); the twin of the store all of them.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from everstep.model.table import OptimizerKind, OptimizerSpec

F32 = NDArray[np.float32]

_LANES = 16


def first_state(values: F32, opt: OptimizerSpec) -> F32:
    """Return the optimizer state of a new row that begins with ``values``."""
    dim = len(values)
    state = np.zeros(opt.state_floats(dim), np.float32)
    match opt.kind:
        case OptimizerKind.SGD if len(state) and opt.dampening != 0:
            state[0] = np.nan  # no gradient yet: the first one is not dampened
        case OptimizerKind.ADAGRAD | OptimizerKind.ROWWISE_ADAGRAD:
            state[:dim] = opt.initial_accumulator  # (a count of steps behind them begins at 0)
        case OptimizerKind.NADAM:
            state[2 * dim + 1] = 1  # mu_product
        case OptimizerKind.FTRL:
            pull, l1 = np.float32(opt.beta / opt.lr + opt.l2), np.float32(opt.l1)
            z = -values * pull - np.where(values > 0, l1, -l1)
            state[:dim] = np.where(values == 0, np.float32(0), z)
    return state


def _squares(x: F32) -> np.float32:
    """Sum of squares in 16 fixed lanes, then halves onto halves."""
    padded = np.zeros(-(-len(x) // _LANES) * _LANES, np.float32)
    padded[: len(x)] = x
    lanes = np.zeros(_LANES, np.float32)
    for chunk in padded.reshape(-1, _LANES):
        lanes += chunk * chunk
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return np.float32(lanes[0])


def update(w: F32, s: F32, g: F32, opt: OptimizerSpec, lr: float) -> None:
    """Do one optimizer step on one row: ``w`` float32 ``[dim]`` and its state ``s`` change in place."""
    f = np.float32
    dim = len(w)
    if opt.weight_decay != 0:
        if opt.decoupled or opt.kind is OptimizerKind.ADAMW:
            w[:] = w * f(1.0 - lr * opt.weight_decay)
        else:
            g = g + f(opt.weight_decay) * w
    match opt.kind:
        case OptimizerKind.SGD:
            if opt.momentum > 0:
                s[:] = g if np.isnan(s[0]) else s * f(opt.momentum) + f(1.0 - opt.dampening) * g
                g = g + f(opt.momentum) * s if opt.nesterov else s
            w[:] = w - f(lr) * g
        case OptimizerKind.ADAGRAD:
            if len(s) > dim:
                s[dim] += f(1)
                lr = lr / (1.0 + (float(s[dim]) - 1.0) * opt.lr_decay)
            s[:dim] = s[:dim] + g * g
            w[:] = w - f(lr) * g / (np.sqrt(s[:dim]) + f(opt.eps))
        case OptimizerKind.ROWWISE_ADAGRAD:
            s[0] = s[0] + _squares(g) / f(dim)
            w[:] = w - f(lr) / (np.sqrt(s[0]) + f(opt.eps)) * g
        case OptimizerKind.ADAM | OptimizerKind.ADAMW:
            m, v = s[:dim], s[dim : 2 * dim]
            s[2 * dim] += f(1)
            t = float(s[2 * dim])
            step = f(lr / (1.0 - math.pow(opt.beta1, t)))
            bias2 = f(math.sqrt(1.0 - math.pow(opt.beta2, t)))
            m[:] = m + (g - m) * f(1.0 - opt.beta1)
            v[:] = v * f(opt.beta2) + f(1.0 - opt.beta2) * g * g
            if opt.amsgrad:
                s[2 * dim + 1 :] = np.maximum(s[2 * dim + 1 :], v)
                v = s[2 * dim + 1 :]
            w[:] = w - step * m / (np.sqrt(v) / bias2 + f(opt.eps))
        case OptimizerKind.RMSPROP:
            square, mean, buffer = s[:dim], s[dim + 1 : 2 * dim + 1], s[-dim:]
            s[dim] += f(1)
            c = f(1.0 - opt.alpha)
            square[:] = square * f(opt.alpha) + c * g * g
            about = square
            if opt.centered:
                mean[:] = mean + (g - mean) * c
                about = square - mean * mean
            root = np.sqrt(about) + f(opt.eps)
            if opt.momentum > 0:
                buffer[:] = buffer * f(opt.momentum) + g / root
                w[:] = w - f(lr) * buffer
            else:
                w[:] = w - f(lr) * g / root
        case OptimizerKind.ADADELTA:
            square, moved = s[:dim], s[dim : 2 * dim]
            s[2 * dim] += f(1)
            c = f(1.0 - opt.alpha)
            square[:] = square * f(opt.alpha) + c * g * g
            by = np.sqrt(moved + f(opt.eps)) / np.sqrt(square + f(opt.eps)) * g
            moved[:] = moved * f(opt.alpha) + c * by * by
            w[:] = w - f(lr) * by
        case OptimizerKind.ADAMAX:
            m, u = s[:dim], s[dim : 2 * dim]
            s[2 * dim] += f(1)
            step = f(lr / (1.0 - math.pow(opt.beta1, float(s[2 * dim]))))
            m[:] = m + (g - m) * f(1.0 - opt.beta1)
            u[:] = np.maximum(u * f(opt.beta2), np.abs(g) + f(opt.eps))
            w[:] = w - step * m / u
        case OptimizerKind.NADAM:
            m, v = s[:dim], s[dim : 2 * dim]
            s[2 * dim] += f(1)
            t = float(s[2 * dim])
            mu = opt.beta1 * (1.0 - 0.5 * math.pow(0.96, t * opt.momentum_decay))
            after = opt.beta1 * (1.0 - 0.5 * math.pow(0.96, (t + 1.0) * opt.momentum_decay))
            s[2 * dim + 1] *= f(mu)
            product = float(s[2 * dim + 1])
            of_g, of_m = f(lr * (1.0 - mu) / (1.0 - product)), f(lr * after / (1.0 - product * after))
            m[:] = m + (g - m) * f(1.0 - opt.beta1)
            v[:] = v * f(opt.beta2) + f(1.0 - opt.beta2) * g * g
            root = np.sqrt(v / f(1.0 - math.pow(opt.beta2, t))) + f(opt.eps)
            w[:] = w - of_g * g / root - of_m * m / root
        case OptimizerKind.RADAM:
            m, v = s[:dim], s[dim : 2 * dim]
            s[2 * dim] += f(1)
            t = float(s[2 * dim])
            kept, most = math.pow(opt.beta2, t), 2.0 / (1.0 - opt.beta2) - 1.0
            length = most - 2.0 * t * kept / (1.0 - kept)
            m[:] = m + (g - m) * f(1.0 - opt.beta1)
            v[:] = v * f(opt.beta2) + f(1.0 - opt.beta2) * g * g
            by = m / f(1.0 - math.pow(opt.beta1, t)) * f(lr)
            if length > 5.0:
                rect = math.sqrt((length - 4.0) * (length - 2.0) * most / ((most - 4.0) * (most - 2.0) * length))
                by = by * (f(math.sqrt(1.0 - kept)) / (np.sqrt(v) + f(opt.eps))) * f(rect)
            w[:] = w - by
        case OptimizerKind.FTRL:
            z, acc = s[:dim], s[dim:]
            now = acc + g * g
            sigma = (np.sqrt(now) - np.sqrt(acc)) / f(lr)
            z[:] = z + g - sigma * w
            acc[:] = now
            over = np.abs(z) - f(opt.l1)
            size = over / ((f(opt.beta) + np.sqrt(now)) / f(lr) + f(opt.l2))
            w[:] = np.where(over > 0, np.where(z > 0, -size, size), f(0))
