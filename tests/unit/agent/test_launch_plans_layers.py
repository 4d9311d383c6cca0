"""A burst job finds the measured times of its layers in its folder."""

import json

import pytest

from hpcsched.agent.launch_plans import Site, put_layers
from hpcsched.core.jobs import Job
from hpcsched.store.rundir import RunDir
from hpcsched.testing.builders import a_job

KNOWN = {"schema": 1, "model": "net", "device": "cpu", "layers": []}


@pytest.fixture
def site(tmp_path):
    def layers(model, device):
        return KNOWN if (model, device) == ("net", "cpu") else None

    rundir = RunDir(tmp_path)
    return Site(rundir=rundir, run_id="r", user="me", speed=1.0, stand_ins=False, layers=layers)


def given(site, folder, strategy, *, model="net", device="cpu"):
    job = Job(id=1, spec=a_job("a", model=model, strategy=strategy), submit_s=0.0)
    put_layers(job, site, device, folder)
    return json.loads((folder / "layers.json").read_text()) if (folder / "layers.json").exists() else None


def test_it_is_given_what_was_measured_of_its_model_on_this_type_of_device(site, tmp_path):
    assert given(site, tmp_path, {"kind": "burst", "amplification": 2.0}) == KNOWN


def test_its_own_which_it_has_corrected_stays(site, tmp_path):
    (tmp_path / "layers.json").write_text('{"corrected": true}')
    assert given(site, tmp_path, {"kind": "burst"}) == {"corrected": True}


@pytest.mark.parametrize(
    "other",
    [
        {"strategy": {"kind": "ddp"}},
        {"strategy": {"kind": "burst", "plan": "p.json"}},
        {"strategy": {"kind": "burst", "profile": "p.json"}},
        {"strategy": {"kind": "burst"}, "device": "H200"},
        {"strategy": {"kind": "burst"}, "model": "another"},
    ],
)
def test_who_has_no_use_for_it_is_given_nothing(site, tmp_path, other):
    assert given(site, tmp_path, **other) is None
