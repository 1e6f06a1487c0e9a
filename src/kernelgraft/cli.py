"""The command line: one function a verb, no logic. People read stderr and tables; machines read JSON on stdout."""

from __future__ import annotations

import io
import json
import sys
import tempfile
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kernelgraft.errors import KernelgraftError, UsageError
from kernelgraft.terminal import (
    Ablate,
    Batches,
    Device,
    Dtype,
    Folder,
    Force,
    Fresh,
    Jobs,
    Json,
    JudgeOption,
    Model,
    ModeOption,
    Out,
    PolicyOption,
    Prefills,
    Suppliers,
    Trust,
    cache_named,
    checked_device,
    judge_named,
    load_model,
    names,
    people,
    policy_named,
    progress_shown,
    use_of,
)

if TYPE_CHECKING:
    from kernelgraft.models import Loaded
    from kernelgraft.pipeline import Progress

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Put fast kernels into a transformers model, proved on the model's own calls.",
)
TOGETHER = ("research", "integrate", "run")
"""The verbs that several processes, each with a part of the model, can do together."""


@app.command()
def doctor(json_file: Json = None) -> None:
    """Say what this machine has, and which suppliers run on it."""
    from kernelgraft import machine
    from kernelgraft.suppliers import all_suppliers

    card = machine.read()
    suppliers = {s.name: s.unavailable(card) for s in all_suppliers()}
    answer = {"machine": card.model_dump(mode="json"), "suppliers": suppliers}
    if _wrote_json(answer, json_file):
        return
    from kernelgraft.report import doctor_table

    Console().print(doctor_table(card, suppliers))


@app.command()
def research(
    model: Model,
    out: Out = None,
    json_file: Json = None,
    dtype: Dtype = None,
    device: Device = "cpu",
    trust_remote_code: Trust = False,
) -> None:
    """Find the places that can take a kernel, and what each computes."""
    from kernelgraft import pipeline
    from kernelgraft.report import research_table
    from kernelgraft.store import Inventory

    inventory = Inventory(_folder(out, model))
    with progress_shown() as progress:
        loaded = load_model(model, dtype, device, trust_remote_code)
        record, computes = pipeline.led(lambda loaded: _researched(loaded, inventory, progress))(loaded)
    if not _wrote_json(record.model_dump(mode="json"), json_file):
        Console().print(research_table(record))
        _say_files(inventory.root)
    if not computes:
        raise _nothing(model)


def _researched(loaded: Loaded, inventory: Any, progress: Progress) -> tuple[Any, int]:
    """The record, and how many computes there are."""
    from kernelgraft import pipeline

    record, computes = pipeline.research(loaded, inventory, progress=progress)
    return record, len(computes)


@app.command()
def inventory(
    folder: Annotated[Path | None, typer.Argument(help="Also list the Solutions in this folder.")] = None,
    json_flag: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
    compile_flag: Annotated[
        bool,
        typer.Option("--compile", help="Compile every cuTile kernel (and those in the folder); needs no GPU."),
    ] = False,
    arch: Annotated[
        str | None, typer.Option(help="With --compile: for these (default: sm_80,sm_89,sm_90,sm_100,sm_120).")
    ] = None,
    only: Annotated[str | None, typer.Option(help="With --compile: calls whose name has one of these words.")] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Find the fastest configurations of our cuTile kernels on this GPU.")
    ] = False,
    kernel: Annotated[str | None, typer.Option(help="With --tune: comma-separated kernels (default: all).")] = None,
    budget: Annotated[
        float | None, typer.Option(min=0, help="With --tune: seconds after which nothing new is begun; run it again.")
    ] = None,
) -> None:
    """List the Solutions of all suppliers, and why one is unavailable here; compile or tune the cuTile kernels."""
    from dataclasses import asdict

    from kernelgraft import machine
    from kernelgraft.report import compile_table, inventory_table, tuning_table
    from kernelgraft.suppliers import all_suppliers

    if not compile_flag and (arch is not None or only is not None):
        raise UsageError("`--arch` and `--only` say what `--compile` compiles: add it")
    if not tune and (kernel is not None or budget is not None):
        raise UsageError("`--kernel` and `--budget` say what `--tune` tunes: add it")
    store = _existing(folder) if folder else None
    check = _compile_check(store, arch, only) if compile_flag else None
    tuned = _tune(names(kernel), budget) if tune else None
    card = machine.read()
    listings = [line for supplier in all_suppliers() for line in supplier.catalogue(card)]
    stored = list(store.solutions().values()) if store else []
    if json_flag:
        answer = {
            "machine": card.model_dump(mode="json"),
            "catalogue": [asdict(line) for line in listings],
            "solutions": [s.model_dump(mode="json", exclude={"sources"}) for s in stored],
        }
        if check is not None:
            answer["compile"] = check.model_dump(mode="json")
        if tuned is not None:
            answer["tuning"] = tuned.record()
        _wrote_json(answer, Path("-"))
    elif check is None and tuned is None:
        Console().print(inventory_table(listings, stored))
    else:
        Console().print(
            *([] if check is None else [compile_table(check)]), *([] if tuned is None else [tuning_table(tuned)])
        )
    if check is not None and check.wrong:
        raise KernelgraftError(f"{check.wrong} of the compilations and calls above did not succeed")


@app.command()
def plan(folder: Folder, suppliers: Suppliers = None, json_file: Json = None) -> None:
    """Match the researched computes with Solutions: exact, adapter, or a new kernel is needed."""
    from kernelgraft import machine, pipeline
    from kernelgraft.records import Research
    from kernelgraft.report import plan_table

    inventory = _existing(folder)
    chosen = pipeline.chosen(names(suppliers), machine.read())
    record = inventory.load_record("research", Research)
    computes = pipeline.computes_of(record, inventory.definitions())
    if not computes:
        raise _nothing(record.model.name)
    made = pipeline.make_plan(record.model, pipeline.candidates(computes, chosen, machine.read()), inventory)
    if not _wrote_json(made.model_dump(mode="json"), json_file):
        Console().print(plan_table(made))
        _say_files(folder)


@app.command()
def integrate(
    folder: Folder,
    policy: PolicyOption = "fastest",
    judge: JudgeOption = "thorough",
    jobs: Jobs = None,
    fresh: Fresh = False,
    batch: Batches = None,
    prefill: Prefills = None,
    mode: ModeOption = "eager",
    ablate: Ablate = False,
    force: Force = False,
    json_file: Json = None,
    device: Device = "cpu",
    trust_remote_code: Trust = False,
) -> None:
    """Verify the planned Solutions, time them in the model, and write the graft."""
    from kernelgraft import machine, pipeline
    from kernelgraft.identity import model_card
    from kernelgraft.records import Plan, Research
    from kernelgraft.report import graft_table

    inventory, options, use = _existing(folder), judge_named(judge), use_of(batch, prefill, mode, device)
    record = inventory.load_record("research", Research)
    planned = pipeline.planned(inventory.load_record("plan", Plan), inventory)
    how = policy_named(policy)
    with progress_shown() as progress:

        def work(loaded: Loaded) -> Any:
            card = model_card(loaded.model, loaded.ref.spec)
            done, graft = pipeline.already(loaded.model, card, machine.read(), inventory, use)
            if done and not force:
                people.print(f"{done}; --force redoes it")
                return graft
            with pipeline.Judges(options, device=device, jobs=jobs, fresh=fresh, early=device != "cpu") as judges:
                computes = pipeline.recapture(loaded, record, inventory.definitions())
                return pipeline.make_graft(
                    loaded,
                    computes,
                    planned,
                    inventory,
                    policy=how,
                    use=use,
                    ablate=ablate,
                    judges=judges,
                    progress=progress,
                )

        graft = pipeline.led(work)(load_model(record.model.name, record.model.dtype, device, trust_remote_code))
    if not _wrote_json(graft.model_dump(mode="json"), json_file):
        Console().print(graft_table(graft, contributions=None if ablate else _elsewhere(folder / "graft.json")))
        _say_files(folder)


@app.command()
def bench(
    model: Model,
    graft: Annotated[Path | None, typer.Option(help="Folder of the graft; without it only the original runs.")] = None,
    use_cutile: Annotated[
        bool, typer.Option("--use-cutile", help="Only cuTile Solutions: of the graft, or in a graft made now.")
    ] = False,
    suppliers: Annotated[
        str | None, typer.Option(help="Without --graft: make a graft now, from these comma-separated suppliers.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per run.")] = 1,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Length of the prompt, filled up with random tokens (default: as it is).")
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens generated per run.")] = 64,
    cache: Annotated[str, typer.Option(help="dynamic or static.")] = "dynamic",
    compare: Annotated[
        str | None,
        typer.Option(help="Of static-compile,tilegym,liger,kernelgraft; eager always runs."),
    ] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Interleaved rounds of runs.")] = 5,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Then measure what each compute of the graft gains in this setting.")
    ] = False,
    trace: Annotated[bool, typer.Option("--trace/--no-trace", help="On a GPU: trace where its time goes.")] = True,
    json_file: Json = None,
    dtype: Dtype = None,
    device: Device = "cpu",
) -> None:
    """Generate with the original, a graft and other tools' patches, in fresh processes and turns."""
    from kernelgraft import cli_bench
    from kernelgraft.report import bench_table

    chosen, contenders = names(suppliers), names(compare)
    make = graft is None and (bool(chosen) or use_cutile or "kernelgraft" in (contenders or ()))
    if graft is not None and chosen:
        raise UsageError("`--suppliers` says what a new graft is made from: leave it or `--graft` out")
    if ablate and graft is None and not make:
        raise UsageError("`--ablate` measures what a graft gains: give its folder with `--graft`")
    setting: dict[str, Any] = {
        "batch": batch,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "cache": cache_named(cache),
        "dtype": dtype,
        "device": device,
    }
    with tempfile.TemporaryDirectory(prefix="kernelgraft-") as folder:
        used = graft
        if make:
            languages = ["cuda-tile"] if use_cutile else None
            used = cli_bench.made_for(model, Path(folder) / "made", chosen, languages, setting)
        elif graft and use_cutile:
            used = cli_bench.only_cutile(_existing(graft), Path(folder))
        result = cli_bench.measured(model, used, pairs=pairs, compare=contenders, trace=trace, **setting)
        if ablate and used is not None:
            result = cli_bench.ablated(model, used, result, setting)
    if not _wrote_json(result.model_dump(mode="json"), json_file):
        Console().print(bench_table(result))


@app.command("report")
def show_report(
    place: Annotated[
        Path, typer.Argument(help="Folder with a job's records, or a file of `bench --json` or of end_to_end.py.")
    ],
    html: Annotated[
        Path | None,
        typer.Option("--html", help="Write the page to this file (default: report.html beside the records)."),
    ] = None,
    plots: Annotated[
        Path | None, typer.Option("--plots", help="Also write the plots as PNG files to this folder; needs matplotlib.")
    ] = None,
    json_file: Json = None,
) -> None:
    """Show a job's records, and write them as Markdown, as one HTML page and as plots."""
    from kernelgraft import report
    from kernelgraft.store import Inventory

    job = report.read(place)
    files: dict[str, str] = {}
    if job.graft is not None:
        files |= report.write(Inventory(place), job.graft, job.plan, job.bench)
    files["page"] = report.write_page(html or (place if place.is_dir() else place.parent) / "report.html", job)
    if plots is not None:
        files |= report.write_plots(plots, job)
    elif not report.can_plot():
        people.print(report.NO_PLOTS, markup=False, highlight=False, soft_wrap=True)
    answer = {"files": files} if job.graft is None else report.result(job.graft, job.bench, files)
    if not _wrote_json(answer, json_file):
        Console().print(*report.job_tables(job))
        for file in files.values():
            people.print(file, markup=False, highlight=False, soft_wrap=True)


@app.command()
def export(
    graft: Annotated[Path, typer.Argument(help="Folder of the graft.")],
    dest: Annotated[Path, typer.Option(help="Where to write.")],
    format: Annotated[str, typer.Option(help="monkey-patch, flashinfer-trace or hub.")] = "monkey-patch",
    package: Annotated[str, typer.Option(help="Name of the emitted package.")] = "kernelgraft_kernels",
    repo: Annotated[str | None, typer.Option(help="With --format hub: the kernel repository, owner/name.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
) -> None:
    """Write a graft as Python that patches classes before load, as a FlashInfer-Bench trace set or a kernel package."""
    from kernelgraft import emit
    from kernelgraft.records import Graft

    source = _existing(graft)
    record = source.load_record("graft", Graft)
    files = emit.export(
        record, format=format, dest=dest, package=package, inventory=source, overwrite=overwrite, repo=repo
    )
    for file in files:
        print(file)


@app.command()
def check(
    kernels: Annotated[
        str,
        typer.Argument(
            help="What takes which kernel: a .json file, a .py file that defines `kernels`, or pairs separated by `;`: "
            "'RMSNorm=owner/repo:Class', 'RMSNorm@model.layers.*.norm+MLP@model.layers.*.mlp=./folder:Class@v1'."
        ),
    ],
    model: Model,
    numeric: Annotated[
        bool, typer.Option("--numeric/--no-numeric", help="Also run a tiny random model of the same kind with them.")
    ] = True,
    training: Annotated[
        bool, typer.Option("--training", help="The model is to be trained: ask for gradients.")
    ] = False,
    json_file: Json = None,
    device: Device = "cpu",
    trust_remote_code: Trust = False,
) -> None:
    """Check two-class kernels on a model without its weights: names, shapes, saving, data flow, numbers."""
    from kernelgraft.errors import GraftError
    from kernelgraft.layouts.checking import check as find_faults
    from kernelgraft.layouts.reading import read_kernels, read_model

    given = read_kernels(kernels)
    config, make = read_model(model, trust_remote_code)
    where = checked_device(device).partition(":")[0]
    found = find_faults(given, config, make=make, device=where, numeric=numeric, training=training)
    failures = [finding for finding in found if finding.severity != "note"]
    answer = {
        "model": model,
        "kernels": [str(entry) for entry in given],
        "passed": not failures,
        "findings": [finding.record() for finding in found],
    }
    if not _wrote_json(answer, json_file):
        for finding in found:
            print(f"{finding.severity}: {finding}")
        if not found:
            print(f"nothing is wrong with {len(given)} of {len(given)} kernels on {model}")
    if failures:
        lines = "1 finding" if len(failures) == 1 else f"{len(failures)} findings"
        raise GraftError(f"{lines} above: mend the package, or leave the kernel out for `{model}`")


@app.command()
def run(
    model: Model,
    out: Out = None,
    json_file: Json = None,
    suppliers: Suppliers = None,
    policy: PolicyOption = "fastest",
    judge: JudgeOption = "thorough",
    jobs: Jobs = None,
    fresh: Fresh = False,
    batch: Batches = None,
    prefill: Prefills = None,
    mode: ModeOption = "eager",
    ablate: Ablate = False,
    force: Force = False,
    pairs: Annotated[int, typer.Option(min=1, help="Interleaved pairs of benchmark runs.")] = 5,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated per benchmark run.")] = 64,
    dtype: Dtype = None,
    device: Device = "cpu",
    trust_remote_code: Trust = False,
) -> None:
    """The whole job: research, plan, verify, measure, graft, and benchmark."""
    from kernelgraft import cli_bench, machine, pipeline, report
    from kernelgraft.bench import BenchResult
    from kernelgraft.store import Inventory

    chosen, how, options = names(suppliers), policy_named(policy), judge_named(judge)
    use = use_of(batch, prefill, mode, device)
    store = Inventory(_folder(out, model))
    with progress_shown() as progress:
        loaded = load_model(model, dtype, device, trust_remote_code)
        done = pipeline.run_integration(
            loaded,
            store,
            suppliers=chosen,
            policy=how,
            use=use,
            ablate=ablate,
            force=force,
            options=options,
            jobs=jobs,
            fresh=fresh,
            progress=progress,
        )
    if machine.processes()[0]:
        return  # the first one of several writes
    console = people if json_file == Path("-") else Console()
    if done.already:
        people.print(f"{done.already}; --force redoes it")
    elsewhere = None if ablate else _elsewhere(store.root / "report.md")
    console.print(report.graft_table(done.graft, contributions=elsewhere))
    result = store.load_record("bench", BenchResult) if done.already and store.has_record("bench") else None
    if result is not None:
        console.print(report.bench_table(result))
    elif machine.processes()[1] > 1:
        people.print("a model that is split over processes is not benchmarked")
    elif not done.already and done.graft.accepted:
        result = cli_bench.measured(model, store.root, pairs=pairs, new_tokens=new_tokens, dtype=dtype, device=device)
        store.save_record("bench", result)
        console.print(report.bench_table(result))
    files = report.write(store, done.graft, done.plan, result)
    _wrote_json(report.result(done.graft, result, files), json_file)
    _say_files(store.root)


def main() -> None:
    """Entry point: our errors become one line on stderr and their exit code.

    Of several processes that torchrun started, the first one speaks.
    """
    from kernelgraft import machine

    rank, count = machine.processes()
    people.quiet = rank > 0
    try:
        if count > 1 and (verb := " ".join(sys.argv[1:2])) not in TOGETHER:
            raise UsageError(f"`{verb}` is for one process: leave torchrun out, or use {', '.join(TOGETHER)}")
        with redirect_stdout(io.StringIO()) if rank else nullcontext():
            app()
    except KernelgraftError as error:
        people.print(f"kernelgraft: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
    finally:
        if "torch.distributed" in sys.modules and (group := sys.modules["torch.distributed"]).is_initialized():
            group.destroy_process_group()


def _folder(out: Path | None, model: str) -> Path:
    return out or Path("kernelgraft-" + "".join(c if c.isalnum() or c in "-_." else "-" for c in model).strip("-."))


def _compile_check(store: Any, arch: str | None, only: str | None) -> Any:
    from kernelgraft import pipeline
    from kernelgraft.cutile.compiling import ARCHITECTURES

    chosen = ARCHITECTURES if arch is None else names(arch) or ()
    with progress_shown() as progress:
        return pipeline.compile_check(store, architectures=chosen, only=names(only), progress=progress)


def _tune(kernels: list[str] | None, budget_s: float | None) -> Any:
    from kernelgraft.cutile import tuner
    from kernelgraft.kernels.examples import tuned_modules

    with progress_shown() as progress:
        return tuner.tune(tuned_modules(), kernels=kernels, budget_s=budget_s, progress=progress)


def _existing(folder: Path) -> Any:
    from kernelgraft.store import Inventory

    if not folder.is_dir():
        raise UsageError(f"folder `{folder}` does not exist: run `kernelgraft research MODEL --out {folder}` first")
    return Inventory(folder)


def _nothing(model: str) -> KernelgraftError:
    from kernelgraft.errors import NothingToPatch

    return NothingToPatch(f"`{model}` has no site that a kernel could take: the table says what was tried")


def _wrote_json(answer: Any, file: Path | None) -> bool:
    """Write JSON to a file (atomically) or to stdout; True if stdout is taken by it."""
    if file is None:
        return False
    text = json.dumps(answer, indent=2, ensure_ascii=False, allow_nan=False)
    if file == Path("-"):
        print(text)
        return True
    from kernelgraft.store import write_atomic

    write_atomic(file, text + "\n")
    return False


def _elsewhere(file: Path) -> str:
    return f"what each compute gains in the whole model: {file} (--ablate measures it in more rounds and shows it)"


def _say_files(root: Path) -> None:
    people.print(f"records: {root}", markup=False, highlight=False)


if __name__ == "__main__":
    main()
