"""`hpcsched script`: what goes into a batch script, where from, and what is refused."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from places import ROOT

from hpcsched.cli.main import cli
from hpcsched.errors import HpcschedError

JOBS = 'schema = 1\n[[job]]\nname = "{}"\nsteps = 10\ncommand = ["true"]\n'


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to work in, with job sets and a site file that says nothing."""
    monkeypatch.chdir(tmp_path)
    for name in ("DIR", "CONFIG", "GPUS_PER_NODE", "GPUS", "TIME"):
        monkeypatch.delenv(f"HPCSCHED_{name}", raising=False)
    monkeypatch.setenv("HPCSCHED_SITE_CONFIG", str(tmp_path / "site.toml"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.toml").write_text(JOBS.format(name))
    return tmp_path


def call(*words: str) -> Result:
    return CliRunner().invoke(cli, ["script", *words])


def written(*words: str) -> str:
    done = call(*words)
    assert done.exit_code == 0, done.exception
    return done.stdout


def refused(*words: str) -> str:
    done = call(*words)
    assert isinstance(done.exception, HpcschedError) and done.exception.exit_code == 2, done.output
    assert "\n" not in str(done.exception)
    return str(done.exception)


def directives(text: str) -> list[str]:
    """What follows #SBATCH, #BSUB or #$, without names of jobs and files."""
    marks, names = ("#SBATCH", "#BSUB", "#$"), ("--job-name", "--output", "-J", "-o", "-N", "-wd", "-cwd")
    found = [line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith(marks)]
    return [line for line in found if not line.startswith(names)]


def last_words(text: str) -> list[str]:
    return shlex.split(text.splitlines()[-1])


def check_shell(text: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_slurm_script_has_signal_requeue_and_ends_in_exec(site: Path) -> None:
    shape = ("--gpus-per-node", "4", "--time", "2h", "--nodes", "2", "--cpus-per-gpu", "8")
    text = written("slurm", "a.toml", *shape)
    assert directives(text) == [
        "--open-mode=append",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gres=gpu:4",
        "--cpus-per-task=32",
        "--time=2:00:00",
        "--requeue",
        "--no-kill",
        "--signal=B:USR2@120",
    ]
    words = last_words(text)
    assert words[:3] == ["exec", "hpcsched", "run"]
    assert words[3:6] == [str(site / "a.toml"), "--dir", str(site / "hpcsched-run")]
    assert words[6:] == ["--resume", "--requeue", "--max-restarts", "20", "--margin", "60"]
    check_shell(text)


def test_an_lsf_script_warns_in_whole_minutes_and_requeues_by_exit_code(site: Path) -> None:
    text = written(
        *("lsf", "a.toml", "--gpus-per-node", "4", "--time", "90m", "--nodes", "2", "--cpus-per-gpu", "8"),
        *("--margin", "90", "--queue", "gpu", "--account", "p"),
    )
    assert directives(text) == [
        "-n 64",
        '-R "span[ptile=32]"',
        '-gpu "num=4:j_exclusive=yes"',
        "-W 90",
        "-wt '3' -wa 'USR2'",
        "-q gpu",
        "-P p",
        '-Q "99"',
        "-r",
    ]
    assert last_words(text)[-2:] == ["--margin", "90"]
    check_shell(text)


def test_an_sge_script_asks_for_slots_and_is_notified(site: Path) -> None:
    text = written(
        *("sge", "a.toml", "--gpus-per-node", "4", "--time", "90m", "--nodes", "2", "--cpus-per-gpu", "8"),
        *("--queue", "gpu.q", "--account", "p", "--mail", "me@x"),
    )
    assert directives(text) == [
        *("-j y", "-S /bin/bash", "-pe smp 64", "-l gpu=4", "-l h_rt=5400", "-q gpu.q", "-P p"),
        *("-M me@x -m ea", "-notify", "-r y"),
    ]
    assert f"#$ -o {site}/a-$JOB_ID.out" in text.splitlines()
    many = written("sge", "a.toml", "b.toml", "--gpus-per-node", "1", "--max-concurrent", "1", "--once")
    assert "-t 1-2 -tc 1" in directives(many) and "-r n" in directives(many)
    assert '"${dirs[SGE_TASK_ID-1]}"' in many and "-$JOB_ID.$TASK_ID.out" in many
    check_shell(text)
    check_shell(many)


def test_several_sets_are_an_array_with_a_run_directory_each(site: Path) -> None:
    sets = ("a.toml", "b.toml", "c.toml")
    slurm = written("slurm", *sets, "--gpus-per-node", "1", "--max-concurrent", "2", "--dir", "runs")
    assert "--array=0-2%2" in directives(slurm)
    assert f"    {site}/runs/b\n" in slurm and '"${sets[SLURM_ARRAY_TASK_ID]}"' in slurm
    lsf = written("lsf", "a.toml", "b.toml", "--gpus-per-node", "1", "--name", "many")
    assert '#BSUB -J "many[1-2]"' in lsf and '"${dirs[LSB_JOBINDEX-1]}"' in lsf
    check_shell(slurm)
    check_shell(lsf)


def test_the_element_of_an_array_runs_its_own_set(site: Path) -> None:
    text = written("slurm", "a.toml", "b.toml", "--gpus-per-node", "1").replace("exec hpcsched", "echo")
    done = subprocess.run(
        ["bash", "-c", text], env={"SLURM_ARRAY_TASK_ID": "1"}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[:4] == ["run", f"{site}/b.toml", "--dir", f"{site}/hpcsched-run/b"]


def test_chain_and_once_do_not_requeue(site: Path) -> None:
    once = written("slurm", "a.toml", "--gpus-per-node", "1", "--once")
    assert "--no-requeue" in directives(once) and last_words(once)[6:] == ["--resume", "--margin", "60"]
    assert call("lsf", "a.toml", "--gpus-per-node", "1", "--chain", "-o", "job.lsf").exit_code == 0
    words = last_words((site / "job.lsf").read_text())
    assert words[words.index("--chain-script") + 1] == str(site / "job.lsf")
    assert "-Q" not in (site / "job.lsf").read_text()


def test_names_with_blanks_and_quotes_survive_the_shell(site: Path) -> None:
    odd = site / 'it\'s "odd" $HOME'
    odd.mkdir()
    (odd / "a b.toml").write_text(JOBS.format("x"))
    text = written("slurm", str(odd / "a b.toml"), "--gpus-per-node", "1", "--dir", str(odd / "run"))
    assert last_words(text)[3:6] == [str(odd / "a b.toml"), "--dir", str(odd / "run")]
    check_shell(text)


def test_the_site_file_fills_in_what_is_not_said_and_the_header_tells(site: Path) -> None:
    (site / "site.toml").write_text(
        "margin = 120\n[script]\ngpus_per_node = 6\npartition = 'gpu'\ntime = '4h'\nmodules = ['cuda/12']\n"
        "setup = ['ulimit -c 0']\ndirectives = ['--exclusive']\nlauncher = 'ssh'\n"
        "gpu_option = 'gpus-per-node'\n"
    )
    text = written("slurm", "a.toml", "--time", "2h", "--setup", "export X=1")
    assert {
        "--gpus-per-node=6",
        "--partition=gpu",
        "--time=2:00:00",
        "--exclusive",
        "--signal=B:USR2@180",
    } <= {*directives(text)}
    assert f"#   gpus_per_node = 6  ({site}/site.toml)" in text
    assert "#   time = 2h  (command line)" in text
    assert text.index("\nmodule load cuda/12") < text.index("\nulimit -c 0") < text.index("\nexport X=1")
    assert text.startswith("#!/bin/bash -l\n")
    assert last_words(text)[-2:] == ["--launcher", "ssh"]
    assert f"export HPCSCHED_SITE_CONFIG={site}/site.toml" in text


def test_options_for_the_run_go_into_its_line_only_when_given_here(site: Path) -> None:
    (site / "site.toml").write_text("devices = 'cpu:2'\npolicy = 'exclusive'\n")
    given = ("--devices", "replay:6@50", "--profiles", "p.json", "--policy-option", "promote=always")
    text = written("slurm", "a.toml", "--gpus-per-node", "1", *given)
    assert last_words(text)[-6:] == [
        *("--devices", "replay:6@50"),
        *("--policy-option", "promote=always"),
        *("--profiles", "p.json"),
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "--gpus-per-node"),
        (("--gpus-per-node", "1", "--time", "2:00"), '"2:00:00"'),
        (("--gpus-per-node", "1", "--time", "soon"), '"2:00:00"'),
        (("--gpus-per-node", "1", "--time", "0"), '"2:00:00"'),
        (("--gpus-per-node", "1", "--time", "1"), "a smaller --margin"),
        (("--gpus-per-node", "1", "--setup", "a\nb"), "one line"),
        (("--gpus-per-node", "1", "--partition", "a\nb"), "one line"),
        (("--gpus-per-node", "1", "--launcher", "mpirun"), "srun"),
        (("--gpus-per-node", "1", "b.toml", "--chain", "--max-concurrent", "1"), "--requeue"),
        (("--gpus-per-node", "1", "--mem", "64 GB"), "64G"),
        (("--gpus-per-node", "1", "--mem", "64G", "--mem-per-gpu", "32G"), "one of the two"),
        (("--gpus-per-node", "1", "sub/a.toml"), "different names"),
        (("--gpus-per-node", "1", "none.toml"), "none.toml"),
        (("--gpus-per-node", "1", "-o", "b.toml"), "--force"),
        (("--gpus-per-node", "1", "wide.toml"), "job w.gpus: 4 GPUs; accepted: at most 1 on each host"),
        (("--gpus-per-node", "4", "far.toml"), "job f.nodes: 2 hosts; accepted: at most 1"),
        (("--gpus-per-node", "4", "policy.toml"), "marble"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(site: Path, words: tuple[str, ...], says: str) -> None:
    (site / "sub").mkdir()
    (site / "sub" / "a.toml").write_text(JOBS.format("a"))
    (site / "wide.toml").write_text(JOBS.format("w") + "gpus = 4\n")
    (site / "far.toml").write_text(JOBS.format("f") + "nodes = 2\n")
    (site / "policy.toml").write_text(JOBS.format("p") + '[policy]\nname = "best"\n')
    assert says in refused("slurm", "a.toml", *words)


def test_memory_is_asked_for_as_the_site_or_the_user_says(site: Path) -> None:
    (site / "site.toml").write_text('[script]\nmem_per_gpu = "32G"\n')
    shape = ("a.toml", "--gpus-per-node", "4")
    assert "--mem-per-gpu=32G" in directives(written("slurm", *shape))
    typed = directives(written("slurm", *shape, "--mem", "0"))
    assert "--mem=0" in typed and not any(line.startswith("--mem-per-gpu") for line in typed)
    assert not any("mem" in line for line in directives(written("lsf", *shape, "-o", "x") or ""))
    assert "rusage" in refused("lsf", *shape, "--mem", "64G")


def test_each_set_of_an_array_may_be_followed_by_itself(site: Path) -> None:
    text = written("slurm", "a.toml", "b.toml", "--gpus-per-node", "1", "--chain")
    assert {"--array=0-1", "--no-requeue"} <= set(directives(text)) and "--chain" in last_words(text)


@pytest.mark.parametrize("system", ["lsf", "sge"])
def test_a_file_is_needed_to_chain(site: Path, system: str) -> None:
    assert "-o FILE" in refused(system, "a.toml", "--gpus-per-node", "1", "--chain")


def test_a_file_is_replaced_only_by_force(site: Path) -> None:
    (site / "job.sh").write_text("mine")
    refused("slurm", "a.toml", "--gpus-per-node", "1", "-o", "job.sh")
    assert (site / "job.sh").read_text() == "mine"
    assert call("slurm", "a.toml", "--gpus-per-node", "1", "-o", "job.sh", "--force").exit_code == 0
    assert (site / "job.sh").read_text().startswith("#!/bin/bash")


SETS = {"single": ("a.toml",), "several-hosts": ("a.toml", "--nodes", "2"), "chained": ("a.toml", "--chain")}
SETS["array"] = ("a.toml", "b.toml", "c.toml", "--max-concurrent", "2")


@pytest.mark.parametrize("name", sorted(SETS))
def test_the_slurm_examples_say_what_is_printed(site: Path, name: str) -> None:
    example = (ROOT / "jobscripts/slurm" / f"{name}.sbatch").read_text()
    printed = written("slurm", *SETS[name], "--gpus-per-node", "4", "--time", "4h")
    assert directives(example) == directives(printed)
    again = "--chain" if name == "chained" else "--requeue"
    assert last_words(example)[:3] == ["exec", "hpcsched", "run"] and last_words(example)[-1] == again
    check_shell(example)


@pytest.mark.parametrize("name", sorted(SETS))
def test_the_lsf_examples_say_what_is_printed(site: Path, name: str) -> None:
    example = (ROOT / "jobscripts/lsf" / f"{name}.lsf").read_text()
    shape = (
        "--gpus-per-node",
        "4",
        "--cpus-per-gpu",
        "4",
        "--time",
        "4h",
        "--margin",
        "120",
        "-o",
        "out.lsf",
    )
    assert call("lsf", *SETS[name], *shape).exit_code == 0
    assert directives(example) == directives((site / "out.lsf").read_text())
    assert last_words(example)[:3] == ["exec", "hpcsched", "run"]
    check_shell(example)


def test_the_sge_example_says_what_is_printed(site: Path) -> None:
    example = (ROOT / "jobscripts/sge/single.sge").read_text()
    shape = ("--gpus-per-node", "4", "--cpus-per-gpu", "4", "--time", "4h")
    assert directives(example) == directives(written("sge", "a.toml", *shape))
    assert last_words(example)[:3] == ["exec", "hpcsched", "run"]
    check_shell(example)


@pytest.mark.parametrize("system", ["slurm", "lsf"])
@pytest.mark.parametrize("name", ["generic-slurm", "generic-lsf", "summit-like", "single-node"])
def test_the_shipped_sites_make_scripts(
    site: Path, monkeypatch: pytest.MonkeyPatch, name: str, system: str
) -> None:
    monkeypatch.setenv("HPCSCHED_SITE_CONFIG", name)
    assert call(system, "a.toml", "--gpus-per-node", "2", "-o", "out.sh").exit_code == 0
    text = (site / "out.sh").read_text()
    check_shell(text)
    if (name, system) == ("summit-like", "lsf"):
        assert "-nnodes 1" in directives(text) and "--launcher jsrun" in text and "-gpu" not in text


# -- sets without GPUs ---------------------------------------------------------------------------------

ON_CORES = """schema = 1
[[job]]
name = "a"
trainer = "m:T"
strategy = { kind = "ps", cpus = 12.5 }
[[job]]
name = "b"
command = ["prepare"]
strategy = { kind = "cpu", cpus = 3 }
"""


def test_a_set_without_gpus_asks_for_cores_only(site: Path) -> None:
    (site / "cores.toml").write_text(ON_CORES)
    slurm = directives(written("slurm", "cores.toml"))
    assert "--cpus-per-task=13" in slurm and not any("gpu" in line for line in slurm)
    assert "--cpus-per-task=64" in directives(written("slurm", "cores.toml", "--cpus", "64"))
    lsf = directives(written("lsf", "cores.toml", "--cpus", "64"))
    assert "-n 64" in lsf and '-R "span[ptile=64]"' in lsf and not any("gpu" in line for line in lsf)
    assert "--gpus-per-node" in refused("slurm", "cores.toml", "a.toml")


def test_cores_that_are_not_enough_to_start_on_are_refused(site: Path) -> None:
    (site / "cores.toml").write_text(ON_CORES)
    told = refused("slurm", "cores.toml", "--cpus", "2")
    assert "job b.strategy.cpus: 3 cores to start with; accepted: at most 2, or more --cpus" in told


def test_cores_beside_gpus_are_kept_for_these_as_many_as_was_said(site: Path) -> None:
    (site / "cores.toml").write_text(ON_CORES)
    text = written("slurm", "cores.toml", "--gpus-per-node", "4", "--cpus", "64", "--cpus-per-gpu", "12")
    assert {"--gres=gpu:4", "--cpus-per-task=64"} <= set(directives(text))
    words = last_words(text)
    assert words[words.index("--cpus-per-gpu") + 1] == "12"
    assert "--cpus-per-gpu" not in last_words(
        written("slurm", "a.toml", "--gpus-per-node", "4", "--cpus-per-gpu", "12")
    )


def test_a_site_with_gpus_gives_none_to_a_set_without(site: Path) -> None:
    (site / "cores.toml").write_text(ON_CORES)
    (site / "site.toml").write_text("[script]\ngpus_per_node = 4\n")
    assert not any("gpu" in line for line in directives(written("slurm", "cores.toml")))


@pytest.mark.parametrize("words", [("--cpus-per-gpu", "8"), ("--cpus", "32"), ("--cpus", "34")])
def test_cores_that_are_all_kept_for_gpus_are_refused(site: Path, words: tuple[str, ...]) -> None:
    (site / "cores.toml").write_text(ON_CORES)
    told = refused("slurm", "cores.toml", "--gpus-per-node", "4", *words)
    assert f"accepted: at most {2 if '34' in words else 0}, or more --cpus" in told
