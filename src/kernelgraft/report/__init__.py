"""From records to tables, Markdown, plots, a page and the result object; the `write` functions put them on disk."""

from __future__ import annotations

from kernelgraft.report.benches import bench_lines, bench_table, throughput_line
from kernelgraft.report.documents import markdown
from kernelgraft.report.files import job_tables, write, write_page, write_plots
from kernelgraft.report.grafts import compute_name, graft_line, graft_table, leading_seats, leading_solution
from kernelgraft.report.job import Job, read
from kernelgraft.report.kernels import compile_table, tuning_table
from kernelgraft.report.pages import page
from kernelgraft.report.plots import NO_PLOTS, can_plot
from kernelgraft.report.results import result
from kernelgraft.report.tables import doctor_table, inventory_table, plan_table, research_table
from kernelgraft.report.traces import trace_lines
from kernelgraft.report.wording import figure_text, short_name, site_name, variant_text

__all__ = [
    "NO_PLOTS",
    "Job",
    "bench_lines",
    "bench_table",
    "can_plot",
    "compile_table",
    "compute_name",
    "doctor_table",
    "figure_text",
    "graft_line",
    "graft_table",
    "inventory_table",
    "job_tables",
    "leading_seats",
    "leading_solution",
    "markdown",
    "page",
    "plan_table",
    "read",
    "research_table",
    "result",
    "short_name",
    "site_name",
    "throughput_line",
    "trace_lines",
    "tuning_table",
    "variant_text",
    "write",
    "write_page",
    "write_plots",
]
