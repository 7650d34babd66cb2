"""What `loopwright launch` makes of its arguments; what it starts is in tests/integration/launch/test_launch_cli.py."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from loopwright.cli.commands.launch import LaunchPlan, launch, make_plan
from loopwright.cli.commands.launch_ask import ask
from loopwright.cli.commands.launch_options import OPTIONS, Request, read_request
from loopwright.cli.commands.launch_ray import make_ray_plan, run_program
from loopwright.errors import ConfigError, LaunchError, Problems
from loopwright.fabric import LightningEnvironment

PAGE = Path(__file__).resolve().parents[4] / "docs" / "several-machines.md"


def plan(line: str, *, num_gpus: int = 0, num_cpus: int = 8, **variables: str) -> LaunchPlan:
    return make_plan(read_request(shlex.split(line)), num_gpus=num_gpus, num_cpus=num_cpus, variables=variables)


def torchrun(line: str, **machine: int) -> str:
    return " ".join(plan(line, **machine).torchrun)


# -- this machine ----------------------------------------------------------------------------------------------------

HERE = "--standalone --local-addr=127.0.0.1"


def test_without_options_there_is_one_process_or_one_per_gpu() -> None:
    assert torchrun("a.py") == f"{HERE} --nproc-per-node=1"
    assert torchrun("a.py", num_gpus=4) == f"{HERE} --nproc-per-node=4"
    assert torchrun("--accelerator cpu a.py", num_gpus=4) == f"{HERE} --nproc-per-node=1"


@pytest.mark.parametrize("count", ["3", "auto", "cpu", "gpu"])
def test_the_number_of_processes_is_passed_on(count: str) -> None:
    assert torchrun(f"--nproc-per-node {count} a.py", num_gpus=2).endswith(f"--nproc-per-node={count}")


@pytest.mark.parametrize(("devices", "count"), [("2", 2), ("0,3", 2), ("auto", 4), ("-1", 4)])
def test_the_number_of_devices_is_that_of_processes(devices: str, count: int) -> None:
    made = plan(f"--devices {devices} a.py", num_gpus=4)
    assert made.torchrun[-1] == f"--nproc-per-node={count}"
    assert made.variables["LT_DEVICES"] == devices


def test_what_the_trainer_gets_travels_in_variables() -> None:
    made = plan("--accelerator cpu --strategy ddp --precision bf16-mixed --devices 2 a.py")
    assert made.variables == {
        "LT_ACCELERATOR": "cpu",
        "LT_STRATEGY": "ddp",
        "LT_PRECISION": "bf16-mixed",
        "LT_DEVICES": "2",
        "OMP_NUM_THREADS": "4",
    }


def test_torchruns_variables_set_what_the_command_line_does_not() -> None:
    elastic = {
        "NNODES": "1:4",
        "RDZV_BACKEND": "c10d",
        "RDZV_ENDPOINT": "a:29400",
        "RDZV_ID": "job",
        "NPROC_PER_NODE": "8",
    }
    fixed = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29500", "NPROC_PER_NODE": "8"}

    def made(variables: dict[str, str]) -> LaunchPlan:
        named = {f"PET_{name}": value for name, value in variables.items()}
        request = read_request(["--nproc-per-node", "2", "a.py"], named)
        return make_plan(request, num_gpus=0, num_cpus=8, variables=named)

    assert made(elastic).torchrun == (
        "--nnodes=1:4", "--rdzv-backend=c10d", "--rdzv-endpoint=a:29400", "--rdzv-id=job", "--nproc-per-node=2",
    )  # fmt: skip
    assert made(elastic).variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert made(fixed).torchrun == (
        "--nnodes=2", "--node-rank=1", "--master-addr=a", "--master-port=29500", "--nproc-per-node=2",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="for PET_NNODES, got 'many'"):
        made({"NNODES": "many"})


def test_threads_are_shared_unless_the_user_says_how_many() -> None:
    assert plan("--nproc-per-node 3 a.py").variables == {"OMP_NUM_THREADS": "2"}
    assert plan("--nproc-per-node 16 a.py").variables == {"OMP_NUM_THREADS": "1"}
    assert plan("--nproc-per-node cpu a.py").variables == {"OMP_NUM_THREADS": "1"}
    assert plan("--nproc-per-node 3 a.py", OMP_NUM_THREADS="5").variables == {}
    assert plan("a.py").variables == {}


def test_the_program_begins_at_the_first_word_that_is_ours_no_more() -> None:
    request = read_request(["--nproc_per_node=2", "a.py", "--nproc-per-node", "7", "--help", "-m", "--", "x"])
    assert request.options == {"nproc-per-node": "2"}
    assert request.program == ("a.py", "--nproc-per-node", "7", "--help", "-m", "--", "x")
    assert read_request(["--", "-odd.py"]).program == ("-odd.py",)


def test_a_module_in_the_place_of_a_script() -> None:
    made = plan("-m pkg.train --lr 1")
    assert made.torchrun[-1] == "--module"
    assert made.program == ("pkg.train", "--lr", "1")


def test_restarts_logs_and_intervals_are_passed_on() -> None:
    options = "--max-restarts=3 --monitor-interval=0.5 --shutdown-timeout=90 --log-dir=x --redirects=3 --tee=1"
    assert torchrun(f"{options} a.py") == f"--standalone {options} --local-addr=127.0.0.1 --nproc-per-node=1"


# -- several machines ------------------------------------------------------------------------------------------------


def test_machines_that_are_numbered_manually() -> None:
    made = plan("--nnodes 2 --node_rank 1 --master_addr h0 --nproc-per-node 4 a.py")
    assert " ".join(made.torchrun) == (
        "--nnodes=2 --node-rank=1 --master-addr=h0 --master-port=29400 --nproc-per-node=4"
    )
    assert made.variables["LT_NUM_NODES"] == "2"


def test_num_nodes_is_another_name() -> None:
    one = plan("--num-nodes 2 --node-rank 0 --main-address h0 --main-port 6000 a.py")
    assert one == plan("--nnodes 2 --node-rank 0 --main-address h0 --main-port 6000 a.py")
    assert "--master-port=6000" in one.torchrun


def test_machines_that_number_themselves() -> None:
    made = plan("--nnodes 1:4 --rdzv-endpoint h0:29400 --rdzv-id job --rdzv-conf timeout=60 --local-address h1 a.py")
    assert " ".join(made.torchrun) == (
        "--nnodes=1:4 --rdzv-backend=c10d --rdzv-endpoint=h0:29400 --rdzv-id=job --rdzv-conf=timeout=60 "
        "--local-addr=h1 --nproc-per-node=1"
    )
    assert "LT_NUM_NODES" not in made.variables


def test_one_machine_is_this_one() -> None:
    assert torchrun("--nnodes 1 a.py") == torchrun("a.py")
    assert plan("--nnodes 1 a.py").variables == {}
    assert torchrun("--nnodes 1 --main-port 6000 a.py") == (
        "--nnodes=1 --node-rank=0 --master-port=6000 --nproc-per-node=1"
    )


# -- what cannot work ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "Expected a program"),
        ("--nproc 2 a.py", r"got --nproc .*did you mean '--nproc-per-node'"),
        ("--nproc-per-node two a.py", "--nproc-per-node is 'two', expected N|auto|cpu|gpu"),
        ("--nproc-per-node 0 a.py", "for --nproc-per-node, got '0'"),
        ("--nproc-per-node gpu a.py", "Expected a GPU"),
        ("--nproc-per-node 2 --devices 3 a.py", "--nproc-per-node=2 is 2 on this machine, but --devices=3 is 3"),
        ("--devices 0 a.py", "--devices=0"),
        ("--nnodes 2 a.py", "--nnodes=2 needs --node-rank, --main-address"),
        ("--nnodes 2 --node-rank 2 --main-address h a.py", "--node-rank of 0 to 1 with --nnodes=2, got 2"),
        ("--nnodes 3:2 a.py", "for --nnodes, got '3:2'"),
        ("--nnodes 1:2 a.py", "--nnodes=1:2 needs --rdzv-backend, --rdzv-endpoint, --rdzv-id"),
        ("--nnodes 2 --num-nodes 3 a.py", "--nnodes=2 and --num-nodes=3"),
        ("--node-rank 1 --main-address h a.py", "Expected --nnodes with --node-rank, --main-address"),
        ("--nnodes 2 --node-rank 0 --rdzv-endpoint h:1 --rdzv-id 1 a.py", "alternatives"),
        ("--nnodes 2 --rdzv-backend c10d a.py", "needs --rdzv-endpoint, --rdzv-id"),
        ("--main-port 70000 --nnodes 1 a.py", "for --main-port, got '70000'"),
        ("--monitor-interval nan a.py", "for --monitor-interval, got 'nan'"),
        ("--strategy ddp_spawn a.py", "got --strategy=ddp_spawn, which starts its own"),
        ("--strategy DDP_Notebook a.py", "which starts its own"),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(line)


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        plan("--nnodes 2 --strategy ddp_fork --nproc-per-node gpu a.py")
    assert "3 problems" in str(caught.value)


def test_a_problem_ends_the_command_with_a_message_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(["--nproc", "2", "a.py"]) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert shown.err.startswith("loopwright launch: Expected an option of `loopwright launch`, got --nproc")


def test_a_script_that_is_not_there_is_named_with_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert launch(["nowhere.py"]) == 2
    assert f"'nowhere.py', which does not exist in {str(tmp_path)!r}" in capsys.readouterr().err


# -- a file ----------------------------------------------------------------------------------------------------------


def write(folder: Path, text: str) -> str:
    file = folder / "launch.yaml"
    file.write_text(text)
    return str(file)


def test_a_file_has_the_same_keys_and_the_command_line_wins(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        nproc-per-node: 2
        nnodes: 2
        node_rank: 0
        main_address: h0
        precision: bf16-mixed
        devices: [0, 1]
        max-restarts:
        script: train.py
        args: [--lr, 0.1, "a b"]
        """,
    )
    made = plan(f"--config {file} --node-rank 1")
    assert " ".join(made.torchrun) == (
        "--nnodes=2 --node-rank=1 --master-addr=h0 --master-port=29400 --nproc-per-node=2"
    )
    assert made.program == ("train.py", "--lr", "0.1", "a b")
    assert (made.variables["LT_DEVICES"], made.variables["LT_PRECISION"]) == ("0,1", "bf16-mixed")


def test_arguments_after_two_dashes_are_added_to_those_of_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "module: pkg.train\nargs: --lr 1\n")
    assert plan(f"--config {file} -- --steps 3").program == ("pkg.train", "--lr", "1", "--steps", "3")
    assert plan(f"--config {file} -- --steps 3").torchrun[-1] == "--module"


def test_a_program_on_the_command_line_replaces_that_of_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "module: pkg.train\nargs: --lr 1\nnproc-per-node: 3\n")
    made = plan(f"--config {file} other.py")
    assert made.program == ("other.py",)
    assert made.torchrun[-1] == "--nproc-per-node=3"


def test_a_file_may_refer_to_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEAD", "h7")
    file = write(tmp_path, "nnodes: 2\nnode-rank: 0\nmain-address: ${oc.env:HEAD}\nscript: a.py\n")
    assert "--master-addr=h7" in plan(f"--config {file}").torchrun


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nproc-per-nod: 2", "got 'nproc-per-nod'.*did you mean 'nproc-per-node'"),
        ("dry-run: true", "got 'dry-run'"),
        ("nnodes: many", "nnodes in .*, got 'many'"),
        ("script: a.py\nmodule: b", "Expected script or module"),
        ("script: a.py\nargs: {a: 1}", "args in"),
        ("- 1\n- 2", "Expected keys"),
        ("a: [", "Expected readable YAML"),
        ("main-address: ${nothing}", "Expected readable YAML"),
    ],
)
def test_a_file_that_cannot_be_right(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.compile(message, re.DOTALL)):
        plan(f"--config {write(tmp_path, text)} a.py")


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="Expected a YAML file"):
        plan("--config /nowhere.yaml a.py")


# -- what it says ----------------------------------------------------------------------------------------------------


def test_a_dry_run_is_a_line_for_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(shlex.split("--nproc-per-node 2 --strategy ddp --dry-run 'my train.py' --note \"it's\"")) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[0] == "LT_STRATEGY=ddp"
    assert words[-3:] == ["my train.py", "--note", "it's"]
    assert words[words.index("python") :][:3] == ["python", "-m", "torch.distributed.run"]


def test_torchrun_understands_all_that_is_passed_on() -> None:
    from torch.distributed.run import parse_args

    for line in (
        "--nproc-per-node 2 --max-restarts 1 --monitor-interval 1 --log-dir x --redirects 3 --tee 3 a.py --x",
        "--nnodes 2 --node-rank 1 --main-address h a.py",
        "--nnodes 1:2 --rdzv-endpoint h:1 --rdzv-id 1 --rdzv-conf timeout=3 --local-address h -m a.b",
    ):
        made = plan(line)
        parsed = parse_args([*made.torchrun, *made.program])
        assert (parsed.training_script, *parsed.training_script_args) == made.program


def test_the_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        launch(["--help"])
    shown = capsys.readouterr().out
    assert [option.name for option in OPTIONS if f"--{option.name} " not in shown] == []


def test_the_commands_of_the_documentation_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PAGE.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name, content in re.findall(r"```yaml\n# (\S+)\n(.*?)```", text, re.DOTALL):
        Path(name).write_text(content)
    lines = [
        line.split("#")[0]
        for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
        for line in block.replace("\\\n", " ").splitlines()
    ]
    commands = [shlex.split(line)[2:] for line in lines if line.startswith("loopwright launch")]
    assert len(commands) >= 4
    for words in commands:
        words = [re.sub(r"\$\w+", "1", word) for word in words]
        assert launch(["--dry-run", *words]) == 0, (words, capsys.readouterr().err)


def test_one_remedy_of_several_problems_is_printed_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(f"--config {write(tmp_path, 'trainer: 1')} a.py")
    assert caught.value.fix.startswith("use nproc-per-node")
    text = "\n".join(f"{name}: 1" for name in ("trainer", "model", "data", "seed"))
    with pytest.raises(ConfigError) as caught:
        plan(f"--config {write(tmp_path, text)} a.py")
    assert str(caught.value).count("use nproc-per-node") == 1
    assert "1, 2, 3, 4. use nproc-per-node" in str(caught.value)


# -- Ray -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "workers"),
    [("", 1), ("--nproc-per-node 3", 3), ("--nnodes 2 --devices 2", 4), ("--nnodes 1:4 --nproc-per-node 2", (2, 8))],
)
def test_rays_workers_are_counted_as_processes_of_torchrun(
    options: str, workers: int | tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"--ray auto {options} --accelerator cpu --max-restarts 3 --log-dir /runs --dry-run 'my train.py' --lr 1"
    assert launch(shlex.split(line)) == 0
    said = capsys.readouterr().out
    assert f"ScalingConfig(num_workers={workers})" in said
    assert "RunConfig(storage_path='/runs', failure_config=FailureConfig(3))" in said
    assert said.endswith("runs: LT_ACCELERATOR=cpu python 'my train.py' --lr 1\n")


def test_what_ray_decides_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(shlex.split("--ray auto --tee 3 --node-rank 1 --strategy ddp_spawn train.py")) == 2
    said = capsys.readouterr().err
    assert "--node-rank, --tee cannot be used with --ray" in said
    assert "--strategy=ddp_spawn" in said


def test_without_ray_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.setitem(sys.modules, "ray", None)
    assert launch(["--ray", "auto", str(tmp_path / "train.py")]) == 2
    assert "pip install 'loopwright[ray]'" in capsys.readouterr().err


@pytest.mark.parametrize(("code", "ends_well"), [("None", True), ("0", True), ("3", False)])
def test_a_program_in_a_worker_has_its_arguments_and_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: str, ends_well: bool
) -> None:
    (tmp_path / "beside.py").write_text("name = 'beside'")
    program = tmp_path / "train.py"
    program.write_text(
        "import os, sys, beside\n"
        f"print(beside.name, __name__, *sys.argv[1:], os.getcwd(), os.environ['LT_PRECISION'])\nsys.exit({code})"
    )
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LT_PRECISION", "")
    (tmp_path / "below").mkdir()
    request = read_request(["--ray", "auto", "--devices", "1", str(program), "--lr", "1"])
    ray_plan = make_ray_plan(request, 1, {"LT_PRECISION": "32-true", "LT_DEVICES": "1"}, Problems())
    assert "LT_DEVICES" not in ray_plan.variables
    with nullcontext() if ends_well else pytest.raises(LaunchError, match="exit code 3"):
        run_program({"plan": ray_plan, "folder": str(tmp_path / "below")})
    assert capsys.readouterr().out == f"beside __main__ --lr 1 {tmp_path / 'below'} 32-true\n"
    sys.modules.pop("beside")


# -- files of `accelerate config`, questions, SageMaker ---------------------------------------------------------------

ACCELERATES = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_machines": 2, "num_processes": 8,
    "machine_rank": 1, "main_process_ip": "10.0.0.1", "main_process_port": 29500, "mixed_precision": "bf16",
    "rdzv_backend": "static", "same_network": True, "tpu_env": [], "use_cpu": False, "main_training_function": "main",
}  # fmt: skip


def by_file(folder: Path, content: dict[str, object], *flags: str) -> Request:
    path = folder / "accelerate.yaml"
    path.write_text(json.dumps(content))  # JSON is YAML
    return read_request(["--config", str(path), *flags, "a.py"])


def test_a_file_of_accelerate_starts_the_same_processes(tmp_path: Path) -> None:
    request = by_file(tmp_path, ACCELERATES)
    made = make_plan(request, num_gpus=4, num_cpus=8, variables={})
    assert made.torchrun == (
        "--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=29500", "--nproc-per-node=4",
    )  # fmt: skip
    assert made.variables["LT_STRATEGY"] == "ddp"
    assert made.variables["LT_PRECISION"] == "bf16-mixed"
    assert not request.left_out
    assert by_file(tmp_path, ACCELERATES, "--node-rank", "0").options["node-rank"] == "0"


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"distributed_type": "NO", "num_processes": 1}, {"nproc-per-node": "1"}),
        ({"num_processes": 2, "gpu_ids": "1,3"}, {"devices": "1,3", "nproc-per-node": "2", "strategy": "ddp"}),
        ({"distributed_type": "MULTI_CPU", "use_cpu": True}, {"accelerator": "cpu", "strategy": "ddp"}),
        ({"distributed_type": "FSDP", "num_processes": 2}, {"strategy": "fsdp"}),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}, {"strategy": "deepspeed_stage_3"}),
        ({**ACCELERATES, "rdzv_backend": "c10d"}, {"rdzv-endpoint": "10.0.0.1:29500", "rdzv-backend": "c10d"}),
        ({"distributed_type": False, "mixed_precision": False}, {"nproc-per-node": "1", "strategy": None}),
        ({"num_processes": -1}, {"nproc-per-node": None, "strategy": "ddp"}),
        ({**ACCELERATES, "num_processes": None}, {"nproc-per-node": None, "nnodes": "2"}),
        ({"num_processes": 1, "gpu_ids": 3}, {"devices": "3,", "nproc-per-node": "1"}),
        ({"num_processes": 2, "use_cpu": "false"}, {"accelerator": "cuda"}),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": "2"}}, {"strategy": "deepspeed_stage_2"}),
        ({"fp16": True, "dynamo_backend": "NO"}, {"precision": "16-mixed"}),
    ],
)  # fmt: skip
def test_settings_of_accelerate(tmp_path: Path, changes: dict[str, object], options: dict[str, str]) -> None:
    found = by_file(tmp_path, {"distributed_type": "MULTI_GPU", **changes}).options
    assert {name: found.get(name) for name in options} == options


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"compute_environment": "AMAZON_SAGEMAKER"}, "starts a job"),
        ({"distributed_type": "MEGATRON_LM"}, "MEGATRON_LM"),
        ({"num_processes": 3, "num_machines": 2}, "a multiple of num_machines"),
        ({"num_processes": "many"}, "num_processes of 1 or more"),
        ({"mixed_precision": "fp8"}, "mixed_precision"),
        ({"num_procs": 3}, "num_procs"),
        ({"machine_rank": "first"}, "node-rank"),
        ({"main_process_port": 99999}, "main-port"),
        ({"compute_environment": "AZURE"}, "AZURE"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 0}}, "zero_stage of 1, 2 or 3"),
    ],
)
def test_what_accelerate_can_and_a_launch_cannot_is_an_error(
    tmp_path: Path, changes: dict[str, object], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        by_file(tmp_path, {**ACCELERATES, **changes})


def test_a_file_of_accelerate_without_an_address_names_the_missing_option(tmp_path: Path) -> None:
    request = by_file(tmp_path, {**ACCELERATES, "rdzv_backend": "c10d", "main_process_ip": None})
    with pytest.raises(ConfigError, match="--rdzv-endpoint"):
        make_plan(request, num_gpus=4, num_cpus=8, variables={})


def test_questions_write_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = iter(["2", "10.0.0.1", "", "zero", "4", "fsdp", "", "3", "b.py"])
    path = tmp_path / "launch.yaml"
    ask(str(path), lambda question: next(answers))
    assert "Expected a valid value, got 'zero'" in capsys.readouterr().out
    request = read_request(["--config", str(path), "--node-rank", "1"])
    assert request.program == ("b.py",)
    assert request.options == {
        "nnodes": "2", "main-address": "10.0.0.1", "main-port": "29400", "nproc-per-node": "4", "strategy": "fsdp",
        "max-restarts": "3", "node-rank": "1",
    }  # fmt: skip
    before = path.read_text()
    ask(str(path), lambda question: "no")
    assert path.read_text() == before
    answers = iter(["y", "1:4", "a:1", "", "", "", "", "", ""])
    ask(str(path), lambda question: next(answers))
    assert plan(f"--config {path}").torchrun[:2] == ("--nnodes=1:4", "--rdzv-backend=c10d")


def test_without_a_terminal_questions_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert launch(["--ask", str(tmp_path / "a.yaml")]) == 2
    assert "Expected answers on the terminal" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_named_before_the_questions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path, tmp_path / "none" / "a.yaml"):
        assert launch(["--ask", str(path)]) == 2
        assert "Expected a file that can be written" in capsys.readouterr().err


def test_ctrl_c_at_a_question_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(path: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("loopwright.cli.commands.launch.ask", interrupt)
    assert launch(["--ask", str(tmp_path / "a.yaml")]) == 130
    assert "was not written" in capsys.readouterr().err


def test_the_hosts_of_a_sagemaker_job_are_the_machines() -> None:
    job = {"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-2"}
    made = make_plan(read_request(["--nproc-per-node", "4", "a.py"], job), num_gpus=4, num_cpus=8, variables=job)
    assert made.torchrun[:4] == ("--nnodes=2", "--node-rank=1", "--master-addr=algo-1", "--master-port=29400")
    assert read_request(["--nnodes", "1", "a.py"], job).options == {"nnodes": "1"}  # each host by itself
    single = {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}
    assert read_request(["a.py"], single).options == {}
    elastic = read_request(["--nnodes", "1:2", "--rdzv-endpoint", "a:1", "--rdzv-id", "j", "a.py"], job)
    assert "main-address" not in elastic.options
    cluster = LightningEnvironment(variables=job)
    assert (cluster.main_address, cluster.main_port, cluster.node_rank()) == ("algo-1", 29400, 1)
    cluster.validate_settings(num_devices=4, num_nodes=2)
    assert LightningEnvironment(variables={**job, "NODE_RANK": "0"}).node_rank() == 0
