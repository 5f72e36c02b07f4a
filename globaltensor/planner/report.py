"""A strategy from what a search gives: where the time of a step goes, what each stage has, what else was weighed.

The time of a step is that of the rank that ends last, in four parts that add up to it:

    compute         its products, its activations through memory, what a micro-batch takes besides
    communication   reductions within layers, waits for what ZeRO 3 gathers, reductions at the end
    bubble          what it waited for others
    optimizer       its step, and what a step takes besides
"""
from __future__ import annotations

from typing import Any

from globaltensor.planner.checking import FORMAT, RECOGNISED
from globaltensor.planner.pricing import Candidate, Task, schedule_of
from globaltensor.planner.search import SearchResult, least_memory, smallest_changes
from globaltensor.planner.strategy import Strategy
from globaltensor.simulator.memory import held_states
from globaltensor.simulator.stage_times import layer_times, output_times
from globaltensor.simulator.training import (
    SimulatedStep,
    StepCosts,
    TrainingPlan,
    simulate_training,
    step_costs,
)


def strategy_of(task: Task, result: SearchResult, seconds: float) -> Strategy:
    """The strategy that a search of so many seconds gives."""
    head: dict[str, Any] = {"format": FORMAT, "feasible": result.best is not None}
    about = {"search_seconds": seconds, "candidates": result.weighed, "devices": task.devices,
             "cluster": task.cluster.name, "global_batch": task.global_batch, "dtype": "bfloat16",
             "model": {"model": "gpt", "layers": task.gpt.layers, "hidden": task.gpt.hidden, "heads": task.gpt.heads,
                       "seq": task.gpt.sequence, "vocab": task.gpt.vocabulary, "flash": task.gpt.flash},
             "fixed": {name: value for name, value in vars(task.fixed).items()
                       if value is not None and name != "excluded"}}
    menu = [_other_plan(name, one, task) for name, one in result.menu.items()]
    if result.best is None:
        needs = least_memory(task)
        return Strategy(head | about | {"needs": needs, "device": task.cluster.memory,
                                        "smallest_change": smallest_changes(task, needs), "menu": menu})
    best, plan = result.best, result.best.plan
    step = simulate_training(task.gpt, plan, task.cluster)
    costs = step_costs(task.gpt, plan, task.cluster, step.run.schedule.rank_of)
    return Strategy(head | {
        "step_time": best.seconds, "lower_bound": result.lower_bound, "gap": 1 - result.lower_bound / best.seconds,
        **about, "micro_batch": plan.micro_batch, "micro_batches": plan.micro_batches, "schedule": plan.schedule,
        "chunks": plan.chunks, "time": _parts_of_time(task, plan, step, costs),
        "tokens_per_second": task.global_batch * task.gpt.sequence / best.seconds,
        "tflops_per_device": float(step.operations) / best.seconds / task.devices / 1e12,
        "stages": _stages(task, plan, step, costs),
        "memory": {"per_rank": list(best.memory), "device": task.cluster.memory}, "menu": menu,
        "runners_up": [_other_plan(plan_text(one.plan), one, task) for one in result.runners_up]})


def plan_text(plan: TrainingPlan) -> str:
    """A plan in a line: `dp 8 x tp 4 x pp 2, zero 1, zb-h1, micro-batch 2`."""
    axes = [f"{name} {size}" for name, size in (("dp", plan.dp), ("tp", plan.tp), ("pp", plan.pp)) if size > 1]
    kinds = sorted(set(plan.recompute_of_ranks), reverse=True)
    words = [" x ".join(axes) or "one device", "sp" * plan.sequence_parallel, f"zero {plan.zero}" * bool(plan.zero),
             plan.schedule * (plan.pp > 1), f"chunks {plan.chunks}" * ((plan.chunks or 1) > 1),
             "" if kinds == ["none"] else f"recompute {' and '.join(kinds)}", f"micro-batch {plan.micro_batch}"]
    return ", ".join(filter(None, words))


def _other_plan(name: str, one: Candidate | None, task: Task) -> dict[str, Any]:
    if one is None:
        return {"name": name, "step_time": None, "memory": None, "feasible": False}
    return {"name": name, "plan": plan_text(one.plan), "step_time": one.seconds, "memory": one.fullest,
            "feasible": one.fullest <= task.cluster.memory * (1 + 1e-9)}


def parts_of_time(task: Task, plan: TrainingPlan) -> dict[str, float]:
    """Where the time of a step goes, on the rank that ends last."""
    step = simulate_training(task.gpt, plan, task.cluster)
    return _parts_of_time(task, plan, step, step_costs(task.gpt, plan, task.cluster, step.run.schedule.rank_of))


def _parts_of_time(task: Task, plan: TrainingPlan, step: SimulatedStep, costs: StepCosts) -> dict[str, float]:
    gpt, cluster, run = task.gpt, task.cluster, step.run
    ends = step.rank_ends
    rank = max(range(plan.pp), key=lambda r: ends[r].total)
    alone = layer_times(gpt, cluster, plan.micro_batch, plan.tp, plan.sequence_parallel,
                        plan.recompute_of_ranks[rank], 0.0)
    stages = run.schedule.stages_of[rank]
    compute = sum(costs.layers[stage] for stage in stages) * sum(alone) + cluster.micro_batch_overhead
    if len(costs.layers) - 1 in stages:
        compute += sum(output_times(gpt, cluster, plan.micro_batch, plan.tp))
    compute *= plan.micro_batches
    busy, last = float(run.busy[rank]), float(run.last[rank]) - float(min(run.first))
    own = ends[rank]
    return {"compute": compute, "communication": busy - compute + own.reductions, "bubble": last - busy,
            "optimizer": own.optimizer}


def _stages(task: Task, plan: TrainingPlan, step: SimulatedStep, costs: StepCosts) -> list[dict[str, Any]]:
    schedule = schedule_of(plan.schedule, plan.pp, plan.micro_batches, plan.chunks or 1)
    group, layers, stages = plan.dp * plan.tp, iter(range(task.gpt.layers)), list[dict[str, Any]]()
    for index, (n, rank) in enumerate(zip(costs.layers, schedule.rank_of)):
        last = index == len(costs.layers) - 1
        names = [*(["token", "position"] if not index else []), *(f"blocks.{next(layers)}" for _ in range(n)),
                 *(["norm", "head"] if last else [])]
        recompute = plan.recompute_of_ranks[rank]
        reductions = n * (6 if recompute == "full" else 4) * plan.micro_batches
        data = costs.data[index].use * (2 * plan.micro_batches) + costs.data[index].end
        crosses = not last and schedule.rank_of[index + 1] != rank
        stages.append({
            "layers": names, "ranks": list(range(rank * group, (rank + 1) * group)),
            "axes": {"dp": plan.dp, "tp": plan.tp}, "plan": RECOGNISED,
            "sequence": "tp" if plan.sequence_parallel else "", "batch": {"dp": 0}, "zero": plan.zero,
            "recompute": recompute, "forward": float(costs.costs.forward[index]),
            "backward": float(costs.costs.inputs[index] + costs.costs.weights[index]),
            "bytes": {"tp": costs.reduction.bytes * reductions, "dp": data.bytes,
                      "next": step.stage.bytes * plan.micro_batches if crosses else 0},
            "memory": _stage_memory(plan, step, costs, index, rank)})
    return stages


def _stage_memory(plan: TrainingPlan, step: SimulatedStep, costs: StepCosts, index: int,
                  rank: int) -> dict[str, float]:
    """Bytes of one stage. Of a rank with several, what is temporary and what is kept of micro-batches is theirs
    together: each has its share, by layers."""
    mine = step.run.schedule.stages_of[rank]
    of_all = sum(sum(costs.parts[stage]) for stage in mine)
    states, *of_rank = (held_states(plan, sum(costs.parts[stage]), of_all) for stage in (index, *mine))
    share = costs.layers[index] / sum(costs.layers[s] for s in mine)
    temporary = max(step.states[rank] - float(sum(one.total for one in of_rank)), 0.0) * share
    activations = step.activations[rank] * share
    return {"parameters": float(states.parameters), "gradients": float(states.gradients),
            "optimizer": float(states.optimizer), "activations": activations, "temporary": temporary,
            "total": float(states.total) + activations + temporary}
