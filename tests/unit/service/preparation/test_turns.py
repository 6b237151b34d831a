"""The preparation that computes next: fair among owners, short before long."""

from typing import Any

from windlass.service.preparation.turns import MOST_BEGUN, Candidate, OwnerShares, choose_running


def _waiting(job_id: str, owner: str, nbytes: int = 10, **more: Any) -> Candidate:
    return Candidate(job_id=job_id, owner=owner, nbytes=nbytes, created_at=float(job_id[1:]), **more)


def _begun(job_id: str, owner: str, computed_s: float, nbytes: int = 10) -> Candidate:
    return _waiting(job_id, owner, nbytes, computed_s=computed_s, has_process=True)


def test_owners_take_turns_regardless_of_number_of_jobs() -> None:
    jobs = [_waiting("j1", "ann"), _waiting("j2", "ann"), _waiting("j3", "ann"), _waiting("j4", "bob")]
    assert choose_running(jobs, {}, num_side_by_side=2) == ["j1", "j4"]
    assert choose_running(jobs, {}, num_side_by_side=3) == ["j1", "j4", "j2"]


def test_the_owner_who_computed_least_of_late_goes_first() -> None:
    jobs = [_begun("j1", "ann", 400.0), _waiting("j2", "bob")]
    assert choose_running(jobs, {"ann": 400.0}, num_side_by_side=1) == ["j2"]
    assert choose_running(jobs, {"ann": 400.0, "bob": 900.0}, num_side_by_side=1) == ["j1"]


def test_owners_keep_their_turn_between_polls() -> None:
    jobs = [_begun("j1", "ann", 3.0), _waiting("j2", "bob")]
    assert choose_running(jobs, {"ann": 3.0}, num_side_by_side=1) == ["j1"]
    assert choose_running(jobs, {"ann": 6.0}, num_side_by_side=1) == ["j2"]


def test_higher_priorities_go_first_whoever_has_used_less() -> None:
    jobs = [_waiting("j1", "ann", priority=1), _waiting("j2", "bob"), _waiting("j3", "ann")]
    assert choose_running(jobs, {"bob": 900.0}, num_side_by_side=2) == ["j3", "j2"]
    assert choose_running(jobs[:2], {"bob": 900.0}, num_side_by_side=1) == ["j2"]


def test_between_owners_the_one_that_has_computed_for_long_goes_last() -> None:
    jobs = [_begun("j1", "ann", 7.0), _waiting("j2", "bob")]
    assert choose_running(jobs, {"ann": 7.0, "bob": 8.0}, num_side_by_side=1) == ["j2"]


def test_shares_an_owner_that_comes_waits_for_no_other_at_first() -> None:
    shares = OwnerShares()
    shares.update_present(["ann"])
    shares.add({"ann": 300.0})
    shares.update_present([])
    shares.update_present(["bob"])
    shares.add({"bob": 4.0})
    shares.update_present(["ann", "bob"])
    jobs = [_begun("j1", "bob", 4.0), _waiting("j2", "ann")]
    assert choose_running(jobs, shares.used_s, num_side_by_side=1) == ["j2"]


def test_shares_owners_that_come_one_after_the_other_are_equal() -> None:
    shares, present = OwnerShares(), ["z"]
    shares.update_present(present)
    shares.add({"z": 100.0})
    for owner in "abcdef":
        present.append(owner)
        shares.update_present(present)
    assert {shares.used_s[owner] for owner in "abcdef"} == {95.0}
    jobs = [_waiting(f"j{number}", owner) for number, owner in enumerate(present)]
    assert choose_running(jobs, shares.used_s, num_side_by_side=1) == ["j1"], "the first of those who came"


def test_shares_one_that_wants_no_cores_gives_no_advantage_to_those_who_come() -> None:
    shares = OwnerShares()
    shares.update_present(["ann", "bob"])
    for _ in range(100):  # ann's job has a lower priority, and gets no turn
        shares.add({"bob": 36.0})
        shares.update_present(["ann", "bob"])
    shares.update_present(["ann", "bob", "carl"])
    assert shares.used_s["carl"] == shares.used_s["bob"] - 5.0


def test_shares_of_an_owner_that_comes_again_and_again_are_no_larger() -> None:
    shares, used_s = OwnerShares(), {"ann": 0.0, "bob": 0.0}
    for number in range(1000):  # bob has always work, ann for half of the time
        jobs = [_waiting("j1", "bob"), *([_waiting("j2", "ann")] if number % 8 < 4 else [])]
        shares.update_present({job.owner for job in jobs})
        (chosen,) = choose_running(jobs, shares.used_s, num_side_by_side=1)
        owner = "bob" if chosen == "j1" else "ann"
        shares.add({owner: 1.0})
        used_s[owner] += 1.0
    assert used_s["bob"] >= 480.0


def test_every_priority_is_served_before_the_next_one() -> None:
    jobs = [_waiting("j1", "ann"), _waiting("j2", "ann"), _waiting("j3", "bob", priority=1000)]
    assert choose_running(jobs, {}, num_side_by_side=2) == ["j1", "j2"]


def test_an_owners_download_takes_no_turn_of_its_other_jobs() -> None:
    jobs = [_waiting("j1", "ann", uses_cores=False), _waiting("j2", "ann", nbytes=99), _waiting("j3", "bob")]
    assert choose_running(jobs, {"bob": 50.0}, num_side_by_side=1) == ["j1", "j2"]


def test_an_urgent_job_does_not_wait_for_its_owners_other_processes() -> None:
    begun = [_waiting(f"j{number}", "ann", priority=5, has_process=True) for number in range(MOST_BEGUN)]
    jobs = [*begun, _waiting("j8", "bob", priority=1), _waiting("j9", "ann")]
    assert choose_running(jobs, {}, num_side_by_side=1) == ["j9"]
    assert choose_running(jobs[:-1], {}, num_side_by_side=1) == ["j8"]


def test_an_owner_has_only_so_many_processes_of_all_priorities() -> None:
    begun = [_waiting(f"j{number}", "ann", priority=9 - number, has_process=True) for number in range(2 * MOST_BEGUN)]
    assert "j9" not in choose_running([*begun, _waiting("j9", "ann")], {}, num_side_by_side=9)


def test_of_one_owner_the_small_file_goes_first_also_before_one_that_computes() -> None:
    jobs = [_begun("j1", "ann", 40.0, nbytes=10**9), _waiting("j2", "ann", nbytes=10**6)]
    assert choose_running(jobs, {"ann": 40.0}, num_side_by_side=1) == ["j2"]
    both = [_waiting("j1", "ann", nbytes=10**9), _waiting("j2", "ann", nbytes=10**6)]
    assert choose_running(both, {}, num_side_by_side=1) == ["j2"]


def test_a_small_file_that_computes_for_long_stands_back() -> None:
    jobs = [_begun("j1", "ann", 40.0, nbytes=1), _waiting("j2", "ann", nbytes=10**9)]
    assert choose_running(jobs, {"ann": 40.0}, num_side_by_side=1) == ["j2"]


def test_an_owner_has_only_so_many_processes() -> None:
    halted = [_begun(f"j{number}", "ann", 40.0) for number in range(MOST_BEGUN)]
    jobs = [*halted, _waiting("j9", "ann", nbytes=1)]
    assert "j9" not in choose_running(jobs, {}, num_side_by_side=9)
    assert "j9" in choose_running([*halted[1:], _waiting("j9", "ann", nbytes=1)], {}, num_side_by_side=9)


def test_downloads_have_their_own_limit() -> None:
    downloads = [_waiting(f"j{number}", "ann", uses_cores=False) for number in range(MOST_BEGUN + 2)]
    jobs = [*downloads, _waiting("j8", "bob"), _waiting("j9", "cat")]
    chosen = choose_running(jobs, {}, num_side_by_side=1)
    assert "j8" in chosen
    assert "j9" not in chosen
    assert sum(job_id in chosen for job_id in ("j0", "j1", "j2", "j3", "j4")) == MOST_BEGUN


def test_those_that_leave_the_cores_to_a_job_that_starts_count_as_begun() -> None:
    halted = [
        _waiting(f"j{number}", "ann", computed_s=40.0, has_process=True, leaves_cores=True)
        for number in range(MOST_BEGUN)
    ]
    assert choose_running([*halted, _waiting("j9", "ann"), _waiting("j8", "bob")], {}, num_side_by_side=9) == ["j8"]
