"""From nothing to every figure: pretrain -> one RL run a seed -> collect -> analyses. Everything is written under runs/<preset>/.

    make reproduce PRESET=mini      or, by hand,
    snakemake --config preset=mini  the profile in profiles/default is picked up by itself; so does snakemake --config preset=paper --executor slurm ...
"""
import shlex
import sys

sys.path.insert(0, workflow.basedir)
from tiny_rlvr.runs import BASE, TABLES
from tiny_rlvr.workflow import DEMYSTIFY, analyses, code_hash, load_preset, preset_params, report_failure, report_success

PRESET = config.get("preset", "mini")
RUN = f"{config.get('runs_root', 'runs')}/{PRESET}"
RESULTS, FIGURES = f"{RUN}/results", f"{RUN}/figures"
ANALYSES = [path.stem for path in analyses()]
N_SEEDS = load_preset(PRESET)["n_seeds"]
SEEDS = range(BASE, N_SEEDS)  # the base model is measured as the others are


def notebook(name):
    return f"nbs/experiments/{name}.ipynb"


def depends(name, without=()):
    "What a notebook's results depend on besides its input files. A job reruns when this changes, and not when the notebook's file does."
    return dict(code=code_hash(notebook(name), without=without), values=preset_params(notebook(name), PRESET))


def run(*params):
    "The shell command that runs a rule's notebook; its executed copy is the rule's log, so that it survives a failure."
    # PASSIVE: threads that wait for each other sleep instead of spinning, which costs 5 x where something else runs on the machine too
    given = " ".join(f"-p {p}" for p in params)
    return (
        "export OMP_NUM_THREADS={threads} MKL_NUM_THREADS={threads} OPENBLAS_NUM_THREADS={threads} OMP_WAIT_POLICY=PASSIVE; "
        f"{shlex.quote(sys.executable)} -m tiny_rlvr.workflow run {{input.notebook:q}} -o {{log:q}} --preset {PRESET} -p results_dir {shlex.quote(RESULTS)} {given}"
    )


rule all:
    input:
        expand(f"{RUN}/done/{{name}}", name=ANALYSES),


# A rerun that fails deletes a rule's outputs, so the checkpoint that a killed pretraining resumes from is none of them.
rule x0_pretrain:
    input:
        notebook=ancient(notebook("x0_pretrain")),
    output:
        f"{RESULTS}/substrate.safetensors",
    log:
        f"{RUN}/notebooks/x0_pretrain.ipynb",
    params:
        depends=depends("x0_pretrain", without=["plots"]),  # a better picture trains nothing again
    threads: workflow.cores
    shell:
        run(f"run_dir {shlex.quote(RUN)}")


rule x1_run:
    input:
        rules.x0_pretrain.output,
        notebook=ancient(notebook("x1_run")),
    output:
        expand(f"{RUN}/seeds/{{{{seed}}}}/{{table}}.parquet", table=TABLES),
    log:
        f"{RUN}/notebooks/x1_run_{{seed}}.ipynb",
    params:
        depends=depends("x1_run", without=["plots"]),
    threads: 1
    shell:
        run(f"run_dir {shlex.quote(RUN)}", "seed {wildcards.seed}")


rule collect:
    input:
        expand(f"{RUN}/seeds/{{seed}}/{{table}}.parquet", seed=SEEDS, table=TABLES),
    output:
        expand(f"{RESULTS}/{{table}}.parquet", table=TABLES),
    shell:
        f"{shlex.quote(sys.executable)} -m tiny_rlvr.workflow collect {shlex.quote(RUN)} {shlex.quote(RESULTS)} --n-seeds {N_SEEDS}"


# Which figures an analysis draws is its own business; the mark says that all of them are there.
rule analysis:
    input:
        rules.collect.output,
        rules.x0_pretrain.output,
        notebook=ancient(notebook("{name}")),
    output:
        touch(f"{RUN}/done/{{name}}"),
    wildcard_constraints:
        name="|".join(ANALYSES),
    log:
        f"{RUN}/notebooks/{{name}}.ipynb",
    params:
        depends=lambda wildcards: depends(wildcards.name),
    threads: 1
    shell:
        run(f"figures_dir {shlex.quote(FIGURES)}")


# No part of `all`: every problem there is, for the base and for a tuned policy that was kept. A killed census goes on from its parts, which are no outputs.
rule x1_census:
    input:
        rules.collect.output,
        rules.x0_pretrain.output,
        notebook=ancient(notebook("x1_census")),
    output:
        touch(f"{RUN}/done/x1_census"),
    log:
        f"{RUN}/notebooks/x1_census.ipynb",
    params:
        depends=depends("x1_census"),
    threads: workflow.cores
    shell:
        run(f"figures_dir {shlex.quote(FIGURES)}", f"run_dir {shlex.quote(RUN)}")


# No part of `all` either: a few seeds of each of several settings, on calibration problems. Finished runs are kept in runs/<preset>/ablation, which is no output.
rule x1_ablation:
    input:
        rules.x0_pretrain.output,
        notebook=ancient(notebook("x1_ablation")),
    output:
        touch(f"{RUN}/done/x1_ablation"),
    log:
        f"{RUN}/notebooks/x1_ablation.ipynb",
    params:
        depends=depends("x1_ablation"),
    threads: workflow.cores
    shell:
        run(f"figures_dir {shlex.quote(FIGURES)}", f"run_dir {shlex.quote(RUN)}")


# No part of `all` either: the five experiments of `make demystify`, from the frozen substrate. Each trains its seeds one after the other and keeps each one's table,
# so that a killed one goes on with the next seed, and one whose pictures alone changed trains nothing.
rule demystify:
    input:
        expand(f"{RUN}/done/{{name}}", name=DEMYSTIFY),


# Taken up in this order, two at a time, they end nearly together. A rule each, since a priority belongs to a rule.
for rank, NAME in enumerate(["d4_scale", "d1_coverage", "d3_spurious", "d5_entropy_lens", "d2_reward_density"]):

    rule:
        name:
            NAME
        input:
            rules.x0_pretrain.output,
            notebook=ancient(notebook(NAME)),
        output:
            touch(f"{RUN}/done/{NAME}"),
        log:
            f"{RUN}/notebooks/{NAME}.ipynb",
        params:
            depends=depends(NAME),
        threads: 1
        priority: len(DEMYSTIFY) - rank
        shell:
            run(f"figures_dir {shlex.quote(FIGURES)}", f"run_dir {shlex.quote(RUN)}", "run True")


onsuccess:
    print("\n" + report_success(RUN), file=sys.stderr)


onerror:
    print("\n" + report_failure(RUN), file=sys.stderr)
