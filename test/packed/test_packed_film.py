"""FiLM made ahead: a forward pass and loops on the timesteps' part."""

import pytest
import torch
from packed_nets import ERROR, NETS, SEVERAL, cond_of, error, net
from proofs import poisoned_memory

import dpa
from dpa.packed.unet import PackedUnet


@pytest.mark.parametrize("name", [*NETS, "several"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_on_film(cuda, name, dtype):
    """FiLM's parameters computed apart, at more timesteps than the network then runs at."""
    if name == "several":
        unet = dpa.nn.ConditionalUnet1D(diffusion_step_embed_dim=32, **SEVERAL).to(cuda).eval()
    else:
        unet = net(name, cuda)
    packed, exact = PackedUnet(unet, dtype), dpa.reference.plain(unet).double()
    cond = cond_of(unet, 1, cuda)
    film = packed.film(torch.arange(50.0, device=cuda), cond)
    for batch in (1, 3, 16):
        sample = torch.randn(batch, 16, unet.input_dim, device=cuda)
        timestep = torch.randint(50, (batch,), device=cuda)
        with torch.no_grad():
            wide = None if cond is None else cond.double().expand(batch, -1)
            expected = exact(sample.double(), timestep, None, wide)
        got = packed.on_film(sample, film[timestep])
        assert error(got, expected) < ERROR[dtype]
        assert torch.equal(got, packed.on_film(sample, film[timestep]))
        rows = packed.film(timestep.float(), cond)  # few timesteps take another kernel
        torch.testing.assert_close(film[timestep], rows, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*NETS, "several"])
@pytest.mark.parametrize(("batch", "steps"), [(1, 5), (1, 40), (3, 7)])
def test_loops_on_the_timesteps_part_of_film(cuda, name, batch, steps):
    """Kept, it gives the bits of a loop that computes it, and follows the weights."""
    if name == "several":
        unet = dpa.nn.ConditionalUnet1D(diffusion_step_embed_dim=32, **SEVERAL).to(cuda).eval()
    else:
        unet = net(name, cuda)
    packed = PackedUnet(unet, torch.bfloat16)
    shape = (batch, 16, unet.input_dim)
    times = torch.arange(steps, 0, -1, device=cuda).float()
    table = torch.tensor([1.1, -0.4, 0.5, 0.4, 0.05, 0.1], device=cuda).repeat(steps, 1)
    initial, noise = torch.randn(shape, device=cuda), torch.randn(steps, *shape, device=cuda)
    given = {"global_cond": cond_of(unet, batch, cuda), "noise": noise}
    step_film, before = packed.step_film(times), None
    for _ in range(2):
        expected = packed.sample(initial, times, table, 1.0, **given)
        with poisoned_memory():
            got = packed.sample(initial, times, table, 1.0, **given, step_film=step_film)
        assert torch.equal(got, expected)
        assert before is None or not torch.equal(got, before)
        before = got
        with torch.no_grad():
            for parameter in unet.parameters():
                parameter.mul_(0.9)
    args = (initial, step_film, given["global_cond"], packed.packed, packed.config, packed.dtype)
    op = torch.ops.dpa.diffusion_sample_on_film
    torch.library.opcheck(op.default, (*args, table, 1.0, noise))
    torch.library.opcheck(torch.ops.dpa.unet1d_step_film.default, (times, *args[3:]))
    with pytest.raises(RuntimeError, match=r"dpa::diffusion_sample_on_film: step_film must have"):
        op(initial, step_film[:, 1:], *args[2:], table, 1.0)
    with pytest.raises(RuntimeError, match=r"dpa::diffusion_sample_on_film: table must have shape"):
        op(initial, step_film[1:], *args[2:], table, 1.0)
    with pytest.raises(RuntimeError, match=r"dpa::unet1d_step_film: timesteps must be float32"):
        torch.ops.dpa.unet1d_step_film(times.long(), *args[3:])


def test_tables_are_refreshed_as_long_as_somebody_holds_them(monkeypatch):
    unet = net("small", torch.device("cpu"))
    packed, packings = PackedUnet(unet), []
    monkeypatch.setattr(packed, "_step_film", lambda times: times[:, None] + len(packings))
    times = torch.arange(3.0)
    film, address = packed.step_film(times), packed.packed.data_ptr()
    generation = packed.generation
    for _ in range(3):
        packed.step_film(times)
    assert len(packed._films) == 1  # nothing is kept of those that nobody holds
    packings.append(1)
    packed.repack()
    assert torch.equal(film, times[:, None] + 1)
    assert packed.packed.data_ptr() == address and packed.generation == generation
    packed._packed = None  # as after a change of the network's modules: other memory
    packed.repack()
    assert packed.generation > generation and not packed._films


def test_a_condition_may_begin_anywhere(cuda):
    """At an address that is no multiple of 16 bytes, as a row of a larger tensor's may."""
    unet = net("one_level", cuda)
    packed, times = PackedUnet(unet), torch.arange(3.0, device=cuda)
    cond = torch.randn(5, device=cuda)[1:].view(1, 4)
    assert cond.data_ptr() % 16
    assert torch.equal(packed.film(times, cond), packed.film(times, cond.clone()))


def test_film_is_checked(cuda):
    unet = net("small", cuda)
    packed, cond, times = PackedUnet(unet), cond_of(unet, 1, cuda), torch.arange(3.0, device=cuda)
    args = (times, cond, packed.packed, packed.config, packed.dtype)
    torch.library.opcheck(torch.ops.dpa.unet1d_film.default, args)
    film, sample = packed.film(times, cond), torch.randn(3, 16, 2, device=cuda)
    args = (sample, film, *args[2:])
    torch.library.opcheck(torch.ops.dpa.unet1d_on_film.default, args)
    with pytest.raises(RuntimeError, match=r"dpa::unet1d_on_film: film must .*\(B, R\)"):
        packed.on_film(sample, film[:2])
    with pytest.raises(RuntimeError, match=r"dpa::unet1d_film: timesteps must be float32"):
        packed.film(times.long(), cond)
    with pytest.raises(RuntimeError, match=r"dpa::unet1d_film: global_cond must"):
        packed.film(times, None)
    assert packed.film(times[:0], cond).shape == (0, film.shape[1])
