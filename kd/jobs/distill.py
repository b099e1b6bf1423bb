"""Train one run in its folder: what precedes step 1, the loop, what follows it.

Before step 1 come records and scores; after the last step, reports and scores. All
ranks call these functions. Rank 0 writes.
"""

from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from typing import Any

import torch

from kd.core.contracts import Source
from kd.core.errors import ModelError, RunError
from kd.core.evaluation import Sampled, least_score
from kd.core.host import environment, signals
from kd.core.ranks import numbers_of_rank_0
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
from kd.setup.build_teacher import RunContext, spread_text
from kd.setup.recipe import Recipe


def distill(
    setting: RunContext, folder: RunDir, title: str, final: str = "test"
) -> Trained:
    """Train one student in an opened run folder, from its newest checkpoint.

    `title`: shown to the user; `final`: images for scoring the chosen checkpoint at the
    end: "test" (validation images if there are none), "val", or "" (not scored).
    """
    recipe = setting.recipe
    backend = setting.backend
    scores = recipe.task.scores
    backend.barrier()  # rank 0 has opened the folder
    trackers = None
    record = recipe.record
    if backend.rank == 0 and record.trackers:
        # imports accelerate: only if some are named
        from kd.jobs.progress.trackers import Trackers

        trackers = Trackers(
            record.trackers, record.name, folder.path, record.display_keys
        )
    filling = filling_ends(recipe, len(setting.data.train))
    with Console(title, backend.rank != 0, trackers, scores, filling) as console:
        with Observer(setting, folder, console) as observer:
            built = begin(setting, folder, console, title)
            run = observer.watch(built.run)
            with run.span("evaluation"):
                folder.record(before=score_before_training(setting, run, console))
            with signals.training():
                state = train(replace(run, stop=signals.requested))
        # one table per command
        is_main = bool(final) and not recipe.path.name.startswith(BASELINE)
        observer.report(title, timed=is_main)
        for line in epilogue(setting, run, state, folder):
            console.info(f"{title}: {line}")
        scored = None
        if final:
            scored = score_chosen_checkpoint(built, folder, final == "test")
        if scored is not None:
            console.info(f"{title}: {scores.conclusion(scored)}")
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
    """Return the share of the run at which each span ends that only fills a store.

    See `Console`.
    """
    length = recipe.length
    epochs = length.steps * length.batch_size / images or length.epochs
    share = min(1.0, length.views / epochs)
    return {
        "teacher": share * bool(recipe.teacher.cache.views),
        "data": share * (recipe.data.store == "views"),
    }


def begin(setting: RunContext, folder: RunDir, console: Console, title: str) -> Built:
    """Build the run of an opened folder, record its parts, and report findings."""
    recorded = folder.manifest()
    if "teacher_home" not in recorded:
        compared = compare_teachers(setting.recipe, setting.teachers, setting.backend)
        findings = {}
        for comparison in compared:
            console.info(f"{comparison.config_path}: {comparison.text}")
            findings[comparison.config_path] = {
                **comparison.values,
                "text": comparison.text,
            }
        folder.record(teacher_home=findings)
    built = build_run(setting, folder, console)
    facts = built.facts | manifest_facts(built.run, setting)
    require_same("data", recorded, facts)
    require_same("teacher", recorded, facts)
    for name in recorded.get("contents", ()):
        require_same(name, recorded["contents"], facts["contents"])
    folder.record(**facts)
    announce(facts, recorded, setting, console, title)
    step = folder.step()
    if step:
        console.info(f"{title}: resumes from step {step:,}")
    return built


def manifest_facts(run: Run, setting: RunContext) -> dict[str, Any]:
    """Return the manifest's facts on data, teacher and machine."""
    backend = run.backend
    teacher = setting.teachers.model
    data = setting.data
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
    notes = getattr(run.distillation.student, "notes", ())
    if notes:
        facts["student_notes"] = list(notes)
    if teacher is None:
        facts["teacher"] = None
    else:
        facts["parameters"]["teacher"] = count_parameters(teacher)
        # if another rank holds the weights, that rank compares them
        if not is_on_meta(teacher):
            facts["teacher"] = teacher.identity()["teacher"]
    store = getattr(run.teacher, "store", None)
    if store is not None:
        from kd.files.manifest import MANIFEST, sha256  # only where outputs are stored

        facts["answers"] = {"cache": sha256(store.folder / MANIFEST)}
    return facts


def announce(
    facts: Mapping[str, Any],
    recorded: Mapping[str, Any],
    setting: RunContext,
    console: Console,
    title: str,
) -> None:
    """Show the findings of the set-up; `recorded`: those of an earlier start."""
    modes = ", ".join(f"{name} {mode}" for name, mode in facts["modes"].items())
    threads = f", threads {facts['threads']}" if facts["threads"] else ""
    console.info(f"{title}: {facts['batch']}; {modes}{threads}")
    for name, earlier in recorded.get("modes", {}).items():
        mode = facts["modes"].get(name)
        if mode != earlier:
            key = "teacher.precision" if name == "teacher" else "backend.precision"
            console.info(
                f"{name}: {mode} from here on, {earlier} at the last start: `auto`"
                f" follows the machine. {key} names one"
            )
    for note in setting.teachers.notes:
        console.info(f"teacher: {note}")
    for note in facts.get("student_notes", ()):
        console.info(f"student: {note}")
    if "teacher_mib" in facts:
        mib = facts["teacher_mib"]
        console.info(
            f"teacher: {mib['rank']:.2f} of {mib['whole']:.2f} MiB on this rank,"
            f" divided over {setting.backend.world_size}"
        )


def score_before_training(
    setting: RunContext, run: Run, console: Console
) -> dict[str, float]:
    """Score teachers and student before step 1, and return the row.

    It is {} without a teacher that can be scored.
    """
    recipe = setting.recipe
    teachers = setting.teachers
    if teachers.model is None or (
        recipe.task.logits and not recipe.read.teacher_logits
    ):
        return {}
    scores = recipe.task.scores
    row = run.evaluator(run.distillation.student)
    if not run.evaluator.labelled:
        spread = spread_text(teachers)
        console.info(
            f"teacher: no labels to score it with{spread}; before step 1 the student"
            f" has {scores.text(row)}"
        )
        return row
    column = scores.own[0]
    averaged = isinstance(teachers.model, Ensemble) and recipe.task.logits
    teacher_rows = zip(recipe.members, scores.of_teachers(row).values(), strict=False)
    values = {config_path: scored[column.key] for config_path, scored in teacher_rows}
    console.info(
        f"teacher: {column.title} {column.text(values['teacher'])} on the validation"
        f" split{', averaged' if averaged else ''}; student now"
        f" {column.text(row[column.key])}"
    )
    if averaged:
        require_teacher("teacher", values["teacher"], recipe, run)
        # one may have its own order of classes
        for config_path, member in zip(recipe.members, teachers.members, strict=True):
            live = LiveTeacher(
                member, run.backend.device, inference=run.backend.facts.inference
            ).validation()
            member_row = run.evaluator.of(live)(run.distillation.student)
            key = f"teacher_{run.evaluator.selection_metric}"
            values[config_path] = member_row[key]
    for config_path, value in values.items():
        if len(values) > 1:
            model = recipe.members[config_path].model
            console.info(f"{config_path}: '{model}' alone {column.text(value)}")
        require_teacher(config_path, value, recipe, run)
    return row


def require_teacher(config_path: str, reached: float, recipe: Recipe, run: Run) -> None:
    """Require a teacher to be better than chance."""
    chance = run.evaluator.chance
    column = recipe.task.scores.own[0]
    configured = recipe.teacher.min_accuracy
    is_configured = configured >= 0
    least = configured if is_configured else least_score(chance)
    # a chance level of 0 is unknown
    if reached < least or (not is_configured and 0 < reached == least < 1):
        guessing = f"; chance level is {column.text(chance)}" if chance else ""
        wrong = (
            f"has the {column.title} {column.text(reached)} on the validation"
            f" images{guessing}"
        )
        remedy = (
            "Check that its weights were loaded and its classes stand in the data's"
            " order, as --check prints it; torchvision's is that of text (0, 1, 10, 2)."
            " teacher.classes=FILE names them in the teacher's order"
        )
        allowed = (
            f"{'At least' if is_configured else 'More than'} {column.text(least)}"
            " (teacher.min_accuracy)"
        )
        raise ModelError(config_path, wrong, allowed, remedy)


def require_same(key: str, recorded: dict[str, Any], facts: dict[str, Any]) -> None:
    """Refuse to resume a run with another content under a key of the manifest."""
    if key in recorded and key in facts and recorded[key] != facts[key]:
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


def epilogue(setting: RunContext, run: Run, state: State, folder: RunDir) -> list[str]:
    """Return lines on a finished run, such as early stopping and undecodable images."""
    recorded = folder.manifest()
    lines = [skipped_text(state.skipped_in_all, state.step)]
    if run.length.gave_up(state):
        best = f"{run.evaluator.selection_metric} {state.best:.4g}"
        lines.append(
            f"ended after step {state.step}: {state.no_better} evaluations in a row"
            f" were no better than {best}"
        )
    zero = setting.recipe.config.optimizer.zero
    lines.append(memory_text(zero, run, recorded.get("modes", {})))
    store = getattr(run.teacher, "store", None)
    if run.backend.rank == 0 and store is not None:
        count = sum(
            int(store.have_records(view, range(store.num_images)).sum())
            for view in range(max(1, run.length.views))
        )
        reused = reused_outputs(count, run, state, folder)
        earlier = recorded.get("at_hand")
        # the cache may be gone on resume
        if earlier is not None and earlier["outputs"] > reused["outputs"]:
            reused = earlier
        answers = {**recorded["answers"], "count": count}
        folder.record(answers=answers, at_hand=reused)
    splits = (setting.data.train, setting.data.val)
    names = unreadable_names(splits, run, recorded)
    if names:
        folder.record(unreadable=names)
        images = f"{len(names)} images" if len(names) > 1 else "1 image"
        lines.append(
            f"{images} could not be decoded and had weight 0: {', '.join(names[:5])}"
        )
    return [line for line in lines if line]


def reused_outputs(
    stored: int, run: Run, state: State, folder: RunDir
) -> dict[str, Any]:
    """Return the number of reused stored outputs and their cost (None: unknown)."""
    rows = folder.metrics("train")
    computed = sum(row.get("teacher_images", 0.0) for row in rows)
    outputs = max(0, min(state.images, stored) - round(computed))
    each = run.teacher.store.seconds_each() if outputs else 0.0  # type: ignore[attr-defined]
    return {"outputs": outputs, "cpu_seconds": None if each is None else outputs * each}


def memory_text(zero: bool, run: Run, modes: dict[str, str]) -> str:
    """Report the MiB that sharding and bfloat16 save on this rank; "": none."""
    backend = run.backend
    rank_mib = total_mib = backend.counters()["optimizer_mib"]
    if zero:
        mib = torch.tensor([rank_mib], device=backend.device)
        total_mib = backend.reduce_sum(mib).item()
    text = f"optimizer state {rank_mib:.2f} MiB on this rank"
    if total_mib > rank_mib:
        text += (
            f" of {total_mib:.2f} in all: ZeRO-1 over {backend.world_size} ranks gave"
            f" back {total_mib - rank_mib:.2f}"
        )
    in_bf16 = modes.get("teacher", "").startswith("bf16")
    if isinstance(run.teacher, LiveTeacher) and in_bf16:
        return (
            f"{text}; teacher {run.teacher.mib:.2f} MiB in bfloat16, which gave back as"
            " much"
        )
    return text if backend.world_size > 1 else ""


def unreadable_names(
    splits: tuple[Source, Source], run: Run, recorded: Mapping[str, Any]
) -> list[str]:
    """List the images that any rank could not decode, now or in an earlier start."""
    names = set(recorded.get("unreadable", []))
    for source, loader in zip(splits, (run.loader, run.evaluator.loader), strict=True):
        failures_N = torch.zeros(len(source), device=run.backend.device)
        failures_N[list(loader.unreadable)] = 1.0
        ids = run.backend.reduce_sum(failures_N).nonzero()[:, 0].tolist()
        names.update(map(source.name, ids))
    return sorted(names)


@torch.no_grad()
def score_chosen_checkpoint(
    built: Built, folder: RunDir, test: bool = True
) -> Scored | None:
    """Score the chosen checkpoint of a finished run and write scored.json.

    An existing score is read. `test`: on test images, if there are some. Afterwards the
    student has that checkpoint's weights. If rank 0 finds the score in the folder, the
    other ranks return None.
    """
    backend = built.run.backend
    module = built.run.distillation
    test = test and built.test is not None
    source = built.test if test and built.test is not None else built.val
    scored = folder.scored() if backend.rank == 0 else None
    if scored is not None and scored.data != source.fingerprint:
        scored = None
    [has_score] = numbers_of_rank_0(backend, [scored is not None])
    if has_score:
        return scored
    step = evaluations = 0
    if backend.rank == 0:
        state, tensors, _ = folder.best()
        load_distillation(module, tensors)
        step = state.step
        evaluations = len(folder.metrics("val"))
    backend.broadcast_([*module.parameters(), *module.buffers()])
    scored = score(built, step, evaluations, test)
    if backend.rank == 0:
        folder.write_scored(scored)
    return scored


def score(built: Built, step: int, evaluations: int, test: bool) -> Scored:
    """Score the student with its present weights on the test or validation images."""
    source = built.test if test else built.val
    evaluator = built.test_evaluator() if test else built.run.evaluator
    assert source is not None
    row = evaluator(built.run.distillation.student)
    samples = evaluator.samples() if isinstance(evaluator, Sampled) else {}
    images = len(source)
    if evaluator.selection_metric in samples:
        right = samples[evaluator.selection_metric].right
        images = images if right is None else len(right)
    return Scored(
        "test" if test else "val",
        step,
        source.fingerprint,
        images,
        evaluations,
        row,
        samples,
    )
