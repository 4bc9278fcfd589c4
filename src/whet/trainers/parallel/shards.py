"""Shards of a model: its parameters divided among ranks by torch's FSDP2, and their optimizer.

A layer's parameters are gathered for its passes and freed after them; gradients are summed into the
shards. The optimizer works on this rank's part of every tensor, which is a plain tensor.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from whet.models.huggingface import LocalPolicy, find_layers
from whet.trainers.master_weights import WEIGHTS, MasterWeights, open_tensors
from whet.trainers.parallel.ranks import RankAddress

T = TypeVar("T")


class ShardedPass(nn.Module):
    """Module that runs a function while the parameters outside the layers are gathered."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], T]) -> T:
        return compute()


def shard_policy(policy: LocalPolicy, size: int) -> ShardedPass:
    """Divide the parameters of a policy among all ranks, layer by layer.

    Trainable ones are kept in fp32 and rounded to the policy's precision when they are gathered.
    """
    mesh = init_device_mesh(policy.device.type, (size,))
    for layer in find_layers(policy.body):
        _shard(layer, policy, mesh)
    root = ShardedPass(policy.model).eval()
    _shard(root, policy, mesh)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # The loss is a sum over tokens, and so is its gradient: not a mean over ranks.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
    return root


def _shard(module: nn.Module, policy: LocalPolicy, mesh: DeviceMesh) -> None:
    for parameter in module.parameters():
        if parameter.requires_grad and not isinstance(parameter.data, DTensor):
            parameter.data = parameter.data.float()
    fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=True,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=None if policy.dtype == torch.float32 else policy.dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        ),
    )


class ShardWeights(MasterWeights):
    """This rank's part of the trained parameters in fp32, and of their optimizer state."""

    def __init__(self, policy: LocalPolicy, address: RankAddress) -> None:
        self._address = address
        self._sharded = cast(dict[str, DTensor], policy.get_trainable())
        # These share memory with the shards: FSDP gathers what the optimizer has changed.
        own = {n: nn.Parameter(_get_local_part(p.detach())) for n, p in self._sharded.items()}
        super().__init__(policy, own)
        self._reference: Mapping[str, Tensor] = {}

    def compute_gradient(self, loss: Tensor) -> tuple[Tensor | None, ...]:
        """Add the gradient of a loss to that of the shards, on all ranks."""
        loss.backward()
        return (None,) * len(self._sharded)

    def get_accumulated(self) -> list[Tensor | None]:
        for sharded, own in zip(self._sharded.values(), self._master.values(), strict=True):
            own.grad = None if sharded.grad is None else _get_local_part(sharded.grad)
        return super().get_accumulated()

    def drop_gradient(self) -> None:
        for sharded in self._sharded.values():
            sharded.grad = None
        super().drop_gradient()

    def _measure_norm(self) -> Tensor:
        squared = super()._measure_norm() ** 2
        dist.all_reduce(squared)
        return squared.sqrt()

    # ----------------------------------------------------------------- whole tensors

    def copy_to(self, whole: Mapping[str, nn.Parameter] | None) -> None:
        """Gather the weights, and copy them into a whole model on the rank that has one."""
        with torch.no_grad():
            for name, own in self._master.items():
                gathered = self._gather_tensor(name, own.detach())
                if whole is not None:
                    whole[name].copy_(gathered)

    def gather_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Gather weights and optimizer state by file, in the host memory of rank 0."""
        found: dict[str, dict[str, Tensor]] = {}
        for file, named in self.list_tensors().items():
            found[file] = {}
            for key, own in named.items():
                name = key if file == WEIGHTS else key.rpartition("/")[0]
                whole = self._gather_tensor(name, own) if own.ndim else own  # the step is a number
                if self._address.rank == 0:
                    found[file][key] = whole.to("cpu", copy=True)
        return found

    def _gather_tensor(self, name: str, own: Tensor) -> Tensor:
        like = self._sharded[name]
        whole = DTensor.from_local(
            own,
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )
        return whole.full_tensor()

    def _load_file(self, file: Path) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        with open_tensors(file) as tensors:
            for key in cast(list[str], tensors.keys()):
                part = tensors.get_slice(key)
                shape = cast(list[int], part.get_shape())
                found[key] = (
                    part[self._compute_own_slice(shape[0])] if shape else tensors.get_tensor(key)
                )
        return found

    def _compute_own_slice(self, length: int) -> slice:
        """Return this rank's slice of a tensor's first dimension, cut as torch's `chunk` does."""
        size = -(-length // self._address.size)
        return slice(*(min(length, n * size) for n in (self._address.rank, self._address.rank + 1)))

    # ----------------------------------------------------------------- reference

    @property
    def has_reference(self) -> bool:
        return bool(self._reference)

    def keep_reference(self) -> None:
        """Keep a copy of the weights as they are now, for `use_reference`."""
        self._reference = {n: own.detach().clone() for n, own in self._master.items()}

    @contextmanager
    def use_reference(self) -> Generator[None]:
        """Context in which the model has the kept weights."""
        trained = {n: own.detach().clone() for n, own in self._master.items()}
        try:
            self._set_weights(self._reference)
            yield
        finally:
            self._set_weights(trained)

    def _set_weights(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, own in self._master.items():
                own.copy_(weights[name])


def _get_local_part(sharded: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in the same memory."""
    return cast(DTensor, sharded).to_local()
