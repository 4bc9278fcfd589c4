"""Processes that train one model on one machine: start them, send commands, connect them.

Rank 0 is the process that trains; it starts the others. Commands and rows are JSON lines on a
socket pair, so nothing is unpickled; tensors travel by torch's collectives, over gloo on a CPU and
NCCL on GPUs, whose sockets are bound to the loopback device.
"""

import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import torch
from pydantic import Field
from torch import distributed as dist

from whet.config import AdamStep, LossConfig
from whet.errors import ConfigError, NonFiniteUpdate, TrainerError, WhetError, boundary
from whet.io.process import SUPERVISED
from whet.types import GenerationId, Row, Value

STOP_TIMEOUT_S = 10.0
DEATH_TIMEOUT_S = 5.0
"""Limit of the time between a failed collective and the end of the process that caused it."""
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Ranks enter a collective together: only a stopped process makes the others wait."""

T = TypeVar("T")
V = TypeVar("V", bound=Value)


class RankCommand(Value):
    """Work for a rank."""

    name: Literal[
        "connect",
        "forward_backward",
        "recompute",
        "drop_gradient",
        "reduce_gradient",
        "receive_weights",
        "keep_reference",
        "step",
        "gather",
        "restore",
        "start_from",
    ]
    rows: tuple[Row, ...] = ()
    loss: LossConfig | None = None
    adam: AdamStep | None = None
    version: int = 0
    """Version of the weights to receive or restore."""
    folder: Path | None = None
    """The checkpoint to load."""
    shard: bool = False
    """Whether the ranks connect as shards of one model, not as copies."""


class RankReply(Value):
    """Result of a command."""

    metrics: Mapping[str, float] = Field(default_factory=dict[str, float])
    log_ratios: Mapping[GenerationId, Sequence[float]] = Field(
        default_factory=dict[GenerationId, Sequence[float]]
    )
    rows: tuple[Row, ...] = ()
    error: str | None = None
    is_finite: bool = True
    """False if the error is a NonFiniteUpdate."""


class Channel:
    """Sends and receives values over a socket, one JSON line each."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("rb")

    def send(self, value: Value) -> None:
        """Send a value. Raises OSError if the other end is closed."""
        self._connection.sendall(value.model_dump_json().encode() + b"\n")

    def receive(self, kind: type[V]) -> V | None:
        """Receive a value, or None once the other end is closed."""
        try:
            line = self._lines.readline()
        except OSError:
            return None
        return kind.model_validate_json(line) if line.endswith(b"\n") else None

    def close(self) -> None:
        """Close this end."""
        self._lines.close()
        self._connection.close()


class RankAddress(NamedTuple):
    """Rank of a process, and how it finds the others."""

    rank: int
    size: int
    rendezvous: Path
    """File by which the processes find each other."""

    def connect(self, device: torch.device) -> None:
        """Join the process group; returns once all have. Raises TrainerError."""
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
        with boundary(TrainerError, "cannot connect the training processes"):
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                init_method=f"file://{self.rendezvous}",
                rank=self.rank,
                world_size=self.size,
                timeout=COLLECTIVE_TIMEOUT,
            )

    @property
    def threads(self) -> int:
        """Number of threads: this process's share of the CPU cores."""
        return max(1, (os.cpu_count() or 1) // self.size)


class RankProcess:
    """A rank other than this one, as a process."""

    def __init__(self, address: RankAddress, command: Sequence[str], settings: Value) -> None:
        self._address = address
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), *map(str, address)],
                stdin=subprocess.PIPE,  # closed when this process dies, which ends the other
                env={**os.environ, SUPERVISED: "1"},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches this process only
            )
        self._channel = Channel(ours)
        self.send(settings)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, value: Value) -> None:
        """Send a command. Raises TrainerError if the process has ended."""
        try:
            self._channel.send(value)
        except OSError as error:
            raise self._explain_end() from error

    def receive(self) -> RankReply:
        """Return the result of a command.

        Raises:
            NonFiniteUpdate: the rows are not finite.
            TrainerError: the work failed.
            RankLost: the process has ended.
        """
        reply = self._channel.receive(RankReply)
        if reply is None:
            raise self._explain_end()
        if reply.error is not None:
            raise (TrainerError if reply.is_finite else NonFiniteUpdate)(reply.error)
        return reply

    def wait_for_end(self, timeout_s: float) -> bool:
        """Wait until the process ends; returns False if it has not after the timeout."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _explain_end(self) -> "RankLost":
        self.wait_for_end(STOP_TIMEOUT_S)
        return self._build_error()

    def _build_error(self) -> "RankLost":
        """Build the error for a process that has ended."""
        code = self._process.returncode
        how = f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
        return RankLost(
            f"training process {self._address.rank} of {self._address.size} ended ({how}); no "
            "committed step is lost: resume the run"
        )

    def stop(self) -> None:
        """End the process."""
        self._channel.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


class RankLost(TrainerError):
    """A training process ended: the others cannot go on without it."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """All processes of a training, as rank 0 sees them."""

    address: RankAddress
    others: Sequence[RankProcess]

    def connect(self, device: torch.device, build: Callable[[], T], *, shard: bool) -> T:
        """Connect all ranks once their models are loaded; returns what `build` returns here."""
        for rank in self.others:
            rank.receive()  # raises before the collective, which would wait for a failed rank

        def join() -> T:
            self.address.connect(device)
            return build()

        return self.run_everywhere(RankCommand(name="connect", shard=shard), join)

    def run_together(
        self, commands: Sequence[RankCommand], own: Callable[[], T]
    ) -> tuple[T, list[RankReply]]:
        """Run work with collectives: a command on each other rank, and `own` here.

        If it fails in the middle, the ranks cannot go on, and are stopped.

        Raises:
            NonFiniteUpdate: of any rank, after all of them have ended the work.
            TrainerError: it failed, or a process has ended.
        """
        results: list[T] = []
        replies: list[RankReply] = []
        non_finite: list[NonFiniteUpdate] = []
        try:
            for rank, command in zip(self.others, commands, strict=True):
                rank.send(command)
            try:
                results.append(own())
            except NonFiniteUpdate as error:  # raised after the last collective
                non_finite.append(error)
            for rank in self.others:
                try:
                    replies.append(rank.receive())
                except NonFiniteUpdate as error:
                    non_finite.append(error)
        except Exception as error:
            cause = self._find_cause(error)
            self.stop()
            raise cause from error
        if non_finite:
            raise non_finite[0]
        return results[0], replies

    def run_everywhere(self, command: RankCommand, own: Callable[[], T]) -> T:
        """Run work with collectives: the same command on each other rank, and `own` here."""
        result, _ = self.run_together([command for _ in self.others], own)
        return result

    def _find_cause(self, error: Exception) -> Exception:
        """Return what another rank reported before it ended, or that it ended; else the error."""
        if isinstance(error, TrainerError):
            return error
        for rank in self.others:
            if rank.wait_for_end(DEATH_TIMEOUT_S):
                try:
                    rank.receive()
                except TrainerError as cause:
                    return cause
        return error

    def stop(self) -> None:
        """End the other processes."""
        for rank in self.others:
            rank.stop()


@contextmanager
def start_ranks(
    size: int, command: Sequence[str], settings: Value, *, device: str
) -> Generator[RankGroup]:
    """Start the processes of ranks 1 to `size` - 1, and end them with the block.

    Raises:
        ConfigError: the machine has fewer GPUs, or this process has a process group of its own.
    """
    check_gpus(size, torch.cuda.device_count(), device=device)
    if dist.is_initialized():
        raise ConfigError(
            "trainer.gpus needs torch.distributed, which this process already uses: train in "
            "another process, or destroy its process group"
        )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="whet-ranks-")))
        stack.callback(disconnect)
        first, *addresses = (RankAddress(rank, size, folder / "rendezvous") for rank in range(size))
        others: list[RankProcess] = []
        for address in addresses:
            others.append(RankProcess(address, command, settings))
            stack.callback(others[-1].stop)
        yield RankGroup(first, others)


def check_gpus(size: int, found: int, *, device: str) -> None:
    """Check that there are as many GPUs as processes, unless they run on a CPU."""
    if device == "cuda" and not found:
        raise ConfigError("engine.device is 'cuda' but torch finds no GPU: use 'cpu' or 'auto'")
    if device != "cpu" and 0 < found < size:
        raise ConfigError(f"trainer.gpus is {size} but torch finds {found}: set it to {found}")


@dataclass(frozen=True, slots=True)
class OwnRank:
    """This process as a rank that another one started."""

    address: RankAddress
    channel: Channel

    def serve(self, run: Callable[[RankCommand], RankReply], *, ends_on_error: bool) -> None:
        """Answer commands until rank 0 closes the channel.

        With `ends_on_error` a failure ends this process, and thereby the collectives in which the
        others wait for it.
        """
        torch.set_num_threads(self.address.threads)
        while command := self.channel.receive(RankCommand):
            try:
                with boundary(TrainerError, "training failed"):
                    reply = run(command)
            except WhetError as error:  # rank 0 raises it
                is_finite = not isinstance(error, NonFiniteUpdate)
                self.channel.send(RankReply(error=str(error), is_finite=is_finite))
                if ends_on_error and is_finite:
                    raise
                continue
            self.channel.send(reply)


def join_ranks(arguments: Sequence[str], settings: type[V]) -> tuple[OwnRank, V]:
    """Read the arguments and the settings that `start_ranks` gave this process."""
    fileno, rank, size, rendezvous = arguments
    channel = Channel(socket.socket(fileno=int(fileno)))
    address = RankAddress(int(rank), int(size), Path(rendezvous))
    if address.rank < torch.cuda.device_count():
        torch.cuda.set_device(address.rank)
    received = channel.receive(settings)
    if received is None:
        raise TrainerError("the process that started this one has ended")
    return OwnRank(address, channel), received


def disconnect() -> None:
    """Leave the process group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()
