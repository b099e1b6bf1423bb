"""One run in its folder: records and scores before step 1, the loop, reports and scores
after the last step.

All ranks call these functions. Rank 0 writes.
"""

from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from typing import Any

import torch

from kd.core.contracts import Source
from kd.core.errors import ModelError, RunError
from kd.core.evaluation import Sampled
from kd.core.host import environment, signals
from kd.core.ranks import of_rank_0
from kd.core.scores import Scored, Trained, skipped_text
from kd.core.types import State
from kd.engine.loop import train
from kd.engine.run import Run
from kd.engine.snapshot import load_distillation
from kd.files.run_dir import BASELINE, RunDir
from kd.jobs.check import compare_teachers
from kd.jobs.observe import Observer
from kd.jobs.progress.console import Console
from kd.models.classifier import Ensemble
from kd.models.live_teacher import LiveTeacher, count_parameters, is_on_meta
from kd.setup.build import Built, build_run
from kd.setup.build_teacher import Setting, spread_text
from kd.setup.recipe import Recipe


def distill(
    setting: Setting, folder: RunDir, title: str, final: str = "test"
) -> Trained:
    """Train one student in an opened run folder, from its newest checkpoint.

    `title`: shown to the user; `final`: images for scoring the chosen checkpoint at the
    end: "test" (validation images if there are none), "val", or "" (not scored).
    """
    recipe, backend, scores = (
        setting.recipe,
        setting.backend,
        setting.recipe.task.scores,
    )
    backend.barrier()  # rank 0 has opened the folder
    trackers, record = None, recipe.record
    if backend.rank == 0 and record.trackers:
        from kd.jobs.progress.trackers import (
            Trackers,
        )  # imports accelerate: only if some are named

        trackers = Trackers(record.trackers, record.name, folder.path, record.shown)
    with Console(
        title,
        backend.rank != 0,
        trackers,
        scores,
        filling_ends(recipe, len(setting.data.train)),
    ) as console:
        with Observer(setting, folder, console) as observer:
            built = begin(setting, folder, console, title)
            run = observer.watch(built.run)
            with run.span("evaluation"):
                folder.record(before=score_before_training(setting, run, console))
            with signals.training():
                state = train(replace(run, stop=signals.requested))
        observer.report(
            title, timed=bool(final) and not recipe.path.name.startswith(BASELINE)
        )  # one table per command
        for line in epilogue(setting, run, state, folder):
            console.info(f"{title}: {line}")
        scored = (
            score_chosen_checkpoint(built, folder, final == "test") if final else None
        )
        console.info(
            f"{title}: {scores.conclusion(scored)}" if scored is not None else ""
        )
    return Trained(
        folder=folder.path,
        metrics=folder.best_row() if backend.rank == 0 else {},
        scored=scored,
        parameters=count_parameters(run.distillation.student),
        steps=state.step,
    )


# --------------------------------------------------------------------------------
# before step 1


def filling_ends(recipe: Recipe, images: int) -> dict[str, float]:
    """Return the share of the run at which each part of a step ends that only fills a
    cache or store; see `Console`.
    """
    length = recipe.length
    share = min(
        1.0, length.views / (length.steps * length.batch_size / images or length.epochs)
    )
    return {
        "teacher": share * bool(recipe.teacher.cache.views),
        "data": share * (recipe.data.store == "views"),
    }


def begin(setting: Setting, folder: RunDir, console: Console, title: str) -> Built:
    """Build the run of an opened folder, record its parts, and report the set-up's
    findings.
    """
    known = folder.manifest()
    if "teacher_home" not in known:
        compared = compare_teachers(setting.recipe, setting.teachers, setting.backend)
        for one in compared:
            console.info(f"{one.config_path}: {one.text}")
        folder.record(
            teacher_home={
                one.config_path: {**one.values, "text": one.text} for one in compared
            }
        )
    built = build_run(setting, folder, console)
    facts = built.facts | manifest_facts(built.run, setting)
    require_same("data", known, facts)
    require_same("teacher", known, facts)
    for name in known.get("contents", ()):
        require_same(name, known["contents"], facts["contents"])
    folder.record(**facts)
    announce(facts, known, setting, console, title)
    console.info(
        f"{title}: resumes from step {step:,}" if (step := folder.step()) else ""
    )
    return built


def manifest_facts(run: Run, setting: Setting) -> dict[str, Any]:
    """Return the manifest's facts on data, teacher and machine."""
    backend, teacher, data = run.backend, setting.teachers.model, setting.data
    facts: dict[str, Any] = {
        "world_size": backend.world_size,
        "machines": backend.world_size // backend.local_world_size,
        "images": len(data.train),
        "validation_images": len(data.val),
        "batch_size": run.length.batch_size,
        "backend": backend.kind,
        "device": backend.device.type,
        "classes": list(data.classes),
        "data": data.fingerprint,
        "test": data.test.fingerprint if data.test is not None else "",
        "contents": data.contents,
        "environment": environment(),
        "date": date.today().isoformat(),
        "parameters": {"student": count_parameters(run.distillation.student)},
    }
    if setting.teachers.notes:
        facts["teacher_notes"] = setting.teachers.notes
    if notes := getattr(run.distillation.student, "notes", ()):
        facts["student_notes"] = list(notes)
    if teacher is not None:
        facts["parameters"]["teacher"] = count_parameters(teacher)
    if teacher is None or not is_on_meta(
        teacher
    ):  # if another rank holds the weights, that rank compares them
        facts["teacher"] = (
            teacher.identity()["teacher"] if teacher is not None else None
        )
    if (store := getattr(run.teacher, "store", None)) is not None:
        from kd.files.manifest import MANIFEST, sha256  # only where outputs are stored

        facts["answers"] = {"cache": sha256(store.folder / MANIFEST)}
    return facts


def announce(
    facts: Mapping[str, Any],
    known: Mapping[str, Any],
    setting: Setting,
    console: Console,
    title: str,
) -> None:
    """Show the findings of the set-up; `known` is the record of an earlier start."""
    modes = ", ".join(f"{name} {mode}" for name, mode in facts["modes"].items())
    threads = f", threads {facts['threads']}" if facts["threads"] else ""
    console.info(f"{title}: {facts['batch']}; {modes}{threads}")
    for name, before in known.get("modes", {}).items():
        now = facts["modes"].get(name)
        if now != before:
            key = "teacher.precision" if name == "teacher" else "backend.precision"
            text = (
                f"{name}: {now} from here on, {before} at the last start: `auto`"
                " follows the machine"
            )
            console.info(f"{text}. {key} names one")
    for note in setting.teachers.notes:
        console.info(f"teacher: {note}")
    for note in facts.get("student_notes", ()):
        console.info(f"student: {note}")
    if "teacher_mib" in facts:
        rank, total = facts["teacher_mib"]["rank"], facts["teacher_mib"]["whole"]
        console.info(
            f"teacher: {rank:.2f} of {total:.2f} MiB on this rank, divided over"
            f" {setting.backend.world_size}"
        )


def score_before_training(
    setting: Setting, run: Run, console: Console
) -> dict[str, float]:
    """Score teachers and student before step 1; return the row, or {} without a teacher
    that can be scored.
    """
    recipe, teachers = setting.recipe, setting.teachers
    if teachers.model is None or (
        recipe.task.logits and not recipe.read.teacher_logits
    ):
        return {}
    row, scores = run.evaluator(run.distillation.student), recipe.task.scores
    if not run.evaluator.labelled:
        spread = spread_text(teachers)
        console.info(
            f"teacher: no labels to score it with{spread}; before step 1 the student"
            f" has {scores.text(row)}"
        )
        return row
    column, several = (
        scores.own[0],
        isinstance(teachers.model, Ensemble) and recipe.task.logits,
    )
    found = zip(recipe.members, scores.of_teachers(row).values(), strict=False)
    alone = {config_path: values[column.key] for config_path, values in found}
    reached = (
        f"{column.text(alone['teacher'])} on the validation"
        f" split{', averaged' if several else ''}"
    )
    console.info(
        f"teacher: {column.title} {reached}; student now {column.text(row[column.key])}"
    )
    if several:
        require_teacher("teacher", alone["teacher"], recipe, run)
        # one may have its own order of classes
        for config_path, member in zip(recipe.members, teachers.members, strict=True):
            live = LiveTeacher(
                member, run.backend.device, inference=run.backend.facts.inference
            ).validation()
            alone[config_path] = run.evaluator.of(live)(run.distillation.student)[
                f"teacher_{run.evaluator.selection_metric}"
            ]
    for config_path, value in alone.items():
        if len(alone) > 1:
            console.info(
                f"{config_path}: '{recipe.members[config_path].model}' alone {column.text(value)}"
            )
        require_teacher(config_path, value, recipe, run)
    return row


def require_teacher(config_path: str, reached: float, recipe: Recipe, run: Run) -> None:
    """Require a teacher to be better than chance."""
    chance, column, given = (
        run.evaluator.chance,
        recipe.task.scores.own[0],
        recipe.teacher.min_accuracy,
    )
    chosen = given >= 0
    least = given if chosen else min(max(0.5, chance), 2 * chance)
    # Exactly twice the chance level is too little: a perfect teacher whose classes 0 to
    # 11 are in the order of text has that. 1 is enough, and a chance level of 0 is
    # unknown.
    if reached < least or (not chosen and 0 < reached == least < 1):
        guessing = f"; chance level is {column.text(chance)}" if chance else ""
        wrong = (
            f"has the {column.title} {column.text(reached)} on the validation"
            f" images{guessing}"
        )
        remedy = (
            "Check that its weights were loaded and its classes stand in the data's"
            " order, as --check prints it; "
        )
        remedy += (
            "torchvision's is that of text (0, 1, 10, 2). teacher.classes=FILE names"
            " them in the teacher's order"
        )
        allowed = (
            f"{'At least' if chosen else 'More than'} {column.text(least)}"
            " (teacher.min_accuracy)"
        )
        raise ModelError(config_path, wrong, allowed, remedy)


def require_same(key: str, known: dict[str, Any], facts: dict[str, Any]) -> None:
    """Refuse to resume a run on other data, with another teacher or another
    criterion.
    """
    if key in known and key in facts and known[key] != facts[key]:
        wrong = f"this run was started with another {key} (its content hash differs)"
        allowed = "Data, teacher and losses must be unchanged on resume"
        raise RunError(
            "run.name",
            wrong,
            allowed,
            "Choose another run.name, or restore the earlier one",
        )


# --------------------------------------------------------------------------------
# after the last step


def epilogue(setting: Setting, run: Run, state: State, folder: RunDir) -> list[str]:
    """Return lines on a finished run: skipped steps, early stopping, reused outputs,
    memory, undecodable images.
    """
    known, lines = folder.manifest(), [skipped_text(state.skipped_in_all, state.step)]
    if run.length.gave_up(state):
        best = f"{run.evaluator.selection_metric} {state.best:.4g}"
        lines.append(
            f"ended after step {state.step}: {state.no_better} evaluations in a row"
            f" were no better than {best}"
        )
    lines.append(
        memory_text(setting.recipe.config.optimizer.zero, run, known.get("modes", {}))
    )
    if (
        run.backend.rank == 0
        and (store := getattr(run.teacher, "store", None)) is not None
    ):
        count = sum(
            int(store.whole(view, range(store.num_images)).sum())
            for view in range(max(1, run.length.views))
        )
        found = [
            reused_outputs(count, run, state, folder),
            *([known["at_hand"]] if "at_hand" in known else []),
        ]
        most = max(
            found, key=lambda one: one["outputs"]
        )  # the cache may be gone on resume
        folder.record(answers={**known["answers"], "count": count}, at_hand=most)
    broken = unreadable_names((setting.data.train, setting.data.val), run, known)
    if broken:
        folder.record(unreadable=broken)
        count = f"{len(broken)} images" if len(broken) > 1 else "1 image"
        lines.append(
            f"{count} could not be decoded and had weight 0: {', '.join(broken[:5])}"
        )
    return [line for line in lines if line]


def reused_outputs(
    stored: int, run: Run, state: State, folder: RunDir
) -> dict[str, Any]:
    """Return the number of reused stored outputs and their cost (None: unknown)."""
    own = sum(row.get("teacher_images", 0.0) for row in folder.metrics("train"))
    outputs = max(0, min(state.images, stored) - round(own))
    each = run.teacher.store.seconds_each() if outputs else 0.0  # type: ignore[attr-defined]
    return {"outputs": outputs, "cpu_seconds": None if each is None else outputs * each}


def memory_text(zero: bool, run: Run, modes: dict[str, str]) -> str:
    """Report the memory saved by sharding and bfloat16 on this rank, MiB; "" if not
    applicable.
    """
    backend = run.backend
    held = backend.counters()["optimizer_mib"]
    whole = held
    if zero:
        whole = backend.reduce_sum(torch.tensor([held], device=backend.device)).item()
    text = f"optimizer state {held:.2f} MiB on this rank"
    if whole > held:
        text += (
            f" of {whole:.2f} in all: ZeRO-1 over {backend.world_size} ranks gave back"
            f" {whole - held:.2f}"
        )
    if isinstance(run.teacher, LiveTeacher) and modes.get("teacher", "").startswith(
        "bf16"
    ):
        return (
            f"{text}; teacher {run.teacher.mib:.2f} MiB in bfloat16, which gave back as"
            " much"
        )
    return text if backend.world_size > 1 else ""


def unreadable_names(
    splits: tuple[Source, Source], run: Run, known: Mapping[str, Any]
) -> list[str]:
    """List the images of both splits that any rank could not decode, now or in an
    earlier start.
    """
    found = set(known.get("unreadable", []))
    for source, loader in zip(splits, (run.loader, run.evaluator.loader), strict=True):
        broken_N = torch.zeros(len(source), device=run.backend.device)
        broken_N[list(loader.unreadable)] = 1.0
        found |= {
            source.name(id)
            for id in run.backend.reduce_sum(broken_N).nonzero()[:, 0].tolist()
        }
    return sorted(found)


@torch.no_grad()
def score_chosen_checkpoint(
    built: Built, folder: RunDir, test: bool = True
) -> Scored | None:
    """Score the chosen checkpoint of a finished run and write scored.json; an existing
    score is read.

    `test`: on test images, if there are some. Afterwards the student has that
    checkpoint's weights. If rank 0 finds the score in the folder, the other ranks
    return None.
    """
    backend, module = built.run.backend, built.run.distillation
    test = test and built.test is not None
    source = built.test if test and built.test is not None else built.val
    known, step, rows = None, 0, 0
    if backend.rank == 0:
        known = folder.scored()
        known = (
            known if known is not None and known.data == source.fingerprint else None
        )
    [is_known] = of_rank_0(backend, [known is not None])
    if is_known:
        return known
    if backend.rank == 0:
        state, tensors, _ = folder.best()
        load_distillation(module, tensors)
        step, rows = state.step, len(folder.metrics("val"))
    backend.broadcast_([*module.parameters(), *module.buffers()])
    known = score(built, step, rows, test)
    if backend.rank == 0:
        folder.write_scored(known)
    return known


def score(built: Built, step: int, evaluations: int, test: bool) -> Scored:
    """Score the student with its present weights on the test or validation images."""
    evaluator, source = (
        (built.test_evaluator(), built.test)
        if test
        else (built.run.evaluator, built.val)
    )
    assert source is not None
    row = evaluator(built.run.distillation.student)
    samples = evaluator.samples() if isinstance(evaluator, Sampled) else {}
    right = (
        samples[evaluator.selection_metric].right
        if evaluator.selection_metric in samples
        else None
    )
    images = len(source) if right is None else len(right)
    return Scored(
        "test" if test else "val",
        step,
        source.fingerprint,
        images,
        evaluations,
        row,
        samples,
    )
