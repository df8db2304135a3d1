"""Is the engine of a group whose models are in stages: what ``model.step`` does to the step of the group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import nn

from everstep.allreduce.group_engine import GroupEngine
from everstep.allreduce.optimizer import GroupOptimizer
from everstep.allreduce.reducer import Reducer
from everstep.allreduce.step import StepAttempt
from everstep.errors import ScriptError
from everstep.pipeline.copy_slots import CopyMeta
from everstep.pipeline.guard import guard, unguard
from everstep.pipeline.stage_copies import StageCopies
from everstep.pipeline.stage_reducer import StageReducer


class PipelineEngine(GroupEngine):
    """See the top of this file."""

    copies: StageCopies | None = None
    about_copy: Callable[[], CopyMeta | None] = staticmethod(lambda: None)  # of the first stage

    def _begin(self, step: StepAttempt, warm_up_step: bool = False) -> None:
        super()._begin(step, warm_up_step)
        if self.copies is not None:
            self.copies.begin(step.number, self.about_copy(), step.generation)

    def close(self, error: str = "") -> None:
        if self.copies is not None:
            self.copies.close(not error)
            self.unit.waits = None
        super().close(error)

    @property
    def divided(self) -> bool:
        return self.unit.size > 1

    @property
    def spread(self) -> int:
        """Return 1: all processes of a worker see the same samples."""
        return 1

    def _make_reducer(self, params: list[nn.Parameter], names: list[str]) -> Reducer:
        return StageReducer(params, names, self.models, self._backward_over, self.unit)

    def _prepare(self) -> None:
        if not self.models:
            raise ScriptError("no model: call model = job.pipeline(...) before job.steps() (mode pipeline)")
        super()._prepare()

    @property
    def _stages(self) -> StageReducer:
        if not self._in_script or self._reducer is None:
            raise ScriptError("model.step() outside of job.steps(): it trains with the batch of an iteration")
        return cast(StageReducer, self._reducer)

    def begin_passes(self) -> None:
        self._stages.begin_passes()

    def stop_passes(self) -> None:
        self._stages.stop_passes()

    def end_passes(self) -> None:
        self._stages.end_passes()

    @property
    def generation(self) -> int:
        """Return the generation of the group that does the step in hand."""
        return -1 if self._step is None else self._step.generation

    def gradients(self) -> StageReducer:
        """Return what has the gradients. Raises ScriptError outside of the loop."""
        if self._reducer is None:
            raise ScriptError("job.clip_grad_norm_() before job.steps(): there are no gradients yet")
        return cast(StageReducer, self._reducer)

    def may_step(self, optimizer: GroupOptimizer, caller: Any) -> float | None:
        factor = super().may_step(optimizer, caller)
        if factor is not None:
            if self.copies is not None:
                self.copies.finish()
            unguard(_params(optimizer))
        return factor

    def has_stepped(self, optimizer: GroupOptimizer) -> None:
        super().has_stepped(optimizer)
        if self.unit.size > 1:
            guard(_params(optimizer))


def _params(optimizer: GroupOptimizer) -> Sequence[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]
