"""What every `Devices` must do; a test class that inherits it has a fixture with two or more, on "here"."""

from __future__ import annotations

import os

from hpcsched.devices.base import Devices


class DevicesConformance:
    """Tests over a fixture `devices`."""

    def test_indices_count_from_zero_in_order(self, devices: Devices) -> None:
        found = devices.inventory()
        assert len(found) >= 2
        assert [d.index for d in found] == list(range(len(found)))
        assert all(d.host == "here" and d.kind and d.handle for d in found)

    def test_kind_is_that_of_a_device_and_speed_positive(self, devices: Devices) -> None:
        assert devices.kind in {d.kind for d in devices.inventory()}
        assert devices.speed > 0

    def test_inventory_does_not_change(self, devices: Devices) -> None:
        assert devices.inventory() == devices.inventory()

    def test_environment_always_says_which_gpus(self, devices: Devices) -> None:
        for chosen in (devices.inventory()[:1], devices.inventory()[1::-1]):
            env = devices.environment(chosen)
            names = env[devices.visibility.variable]
            assert names in devices.visibility.none or names == ",".join(d.handle for d in chosen)
            numbers = devices.numbered(chosen)
            assert numbers.keys() <= env.keys()
            assert not numbers or len(numbers[devices.visibility.variable].split(",")) == len(chosen)
            assert all(isinstance(k, str) and isinstance(v, str) for k, v in env.items())

    def test_cpus_are_cores_we_may_use(self, devices: Devices) -> None:
        for device in devices.inventory():
            cores = devices.cpus(device)
            assert cores is None or (cores and cores <= os.sched_getaffinity(0))

    def test_one_sample_a_device_in_order(self, devices: Devices) -> None:
        for _ in range(2):
            samples = devices.sample()
            assert [s.gpu for s in samples] == [d.index for d in devices.inventory()]
            for sample in samples:
                assert sample.utilisation is None or 0 <= sample.utilisation <= 1
                assert sample.memory_mib is None or sample.memory_mib >= 0
                assert sample.healthy == (sample.why == "")

    def test_devices_that_nobody_used_are_free_or_nobody_can_say(self, devices: Devices) -> None:
        assert all(devices.free(device) is not False for device in devices.inventory())

    def test_close_twice(self, devices: Devices) -> None:
        devices.close()
        devices.close()
