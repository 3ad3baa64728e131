"""The tests that `make check` leaves out, and the files that come first.

A test is named where all its cases together took more than about 3 s of CPU time, or where it
compiles, simulates or starts processes and was not measured. `make test` runs every one.
"""

from pathlib import PurePath

# Programs around the library, and what needs several processes.
FOLDERS = ("bench", "cli", "demo", "docs", "eval", "export", "faults")
FILES = (
    "acceleration/test_lerobot_commands.py",
    "acceleration/test_lerobot_loops.py",
    "acceleration/test_lerobot_robots.py",
    "library/test_doctor.py",
    "library/test_jit.py",
    "ops/test_everywhere.py",
    "ops/test_own_op.py",
    "ops/test_properties.py",
    "schedulers/test_scheduler_combinations.py",
    "schedulers/test_diffusers_versions.py",
    "training/test_distributed.py",
)
# Of every op's proofs, those that trace or compile it.
PROOFS = ("test_compile", "test_compiled_autograd", "test_opcheck")
TESTS = {
    "sampling/test_control_loop.py": ("test_every_step_gets_its_own_action",),
    "checkpoints/test_which_weights.py": ("test_averages_by_name",),
    "acceleration/test_planners.py": ("test_few_steps_of_clean_diffuser_from_pure_noise",),
    "ops/test_residual_block1d.py": ("test_channels_last_values_gradients_and_order",),
    "packed/test_packed.py": (
        "test_loops_with_local_conditions",
        "test_relu_behind_the_norms",
    ),
    "acceleration/test_real_time.py": ("test_a_loop_continues_the_chunk",),
    "acceleration/test_real_time_loops.py": (
        "test_a_loop_begins_at_a_step",
        "test_what_cannot_continue_says_so",
        "test_x0_is_held",
    ),
    "acceleration/test_writes_and_threads.py": ("test_writes_through_data",),
    "acceleration/test_policy_changes.py": ("test_a_scheduler_that_changes",),
    "acceleration/test_default_dtype.py": (
        "test_a_network",
        "test_a_sampler",
    ),
    "schedulers/test_schedulers.py": ("test_ddpm_predictions_and_clipping",),
    "training/test_channels_last.py": ("test_resnets",),
    "ops/test_saved_tensors.py": (
        "test_modules",
        "test_ops",
    ),
    "acceleration/test_accelerated_scheduler.py": ("test_timesteps_that_change",),
    "acceleration/test_construction.py": (
        "test_a_module_that_fails_shows_its_own_error",
        "test_a_program_runs_with_its_policies_accelerated",
        "test_wrong_usage_of_run",
    ),
    "acceleration/test_acceleration.py": ("test_lerobot_over_episodes_with_reset",),
    "acceleration/test_acceleration_compiled.py": (
        "test_compile_without_a_graph_break",
        "test_compiled_first_a_network_is_compared_too",
        "test_compiled_calls_leave_float_timesteps_to_the_original",
        "test_traced_and_exported_it_is_the_original",
    ),
    "acceleration/test_encoder_kernels_cpu.py": ("test_features_on_the_cpu",),
    "acceleration/test_image_encoders.py": (
        "test_lerobots_preprocessing",
        "test_changed_weights_are_noticed",
        "test_features",
    ),
    "acceleration/test_near_copies.py": ("test_a_near_copy",),
    "acceleration/test_near_policies.py": ("test_checkpoints_load",),
    "acceleration/test_training_dtype.py": ("test_a_lerobot_policy_trains_as_in_float32",),
    "acceleration/test_user_code.py": (
        "test_a_network_that_changes_at_every_call_runs_as_it_is",
        "test_a_change_counts_at_the_next_call",
        "test_compiled_calls_follow",
    ),
    "acceleration/test_network_changes.py": (
        "test_layers_that_become_others_stop_it",
        "test_compiled_calls_follow",
        "test_compiled_calls_stay_compiled_when_weights_are_packed_again",
        "test_compiled_functional_calls_take_the_weights_given",
    ),
    "acceleration/test_policy_variants.py": (
        "test_a_compiled_network_inside_a_policy",
        "test_a_compiled_network_is_compared_with_the_original",
        "test_lerobots_network_compiles_without_a_graph_break",
    ),
    "acceleration/test_other_loops.py": (
        "test_changes_are_followed",
        "test_checkpoints_load",
        "test_copies_and_pickles_run_their_own",
        "test_explain_changes_nothing",
        "test_it_acts_as_before",
        "test_it_acts_as_before_in_sixteen_bits",
        "test_restored_it_is_as_it_was",
    ),
    "library/test_build.py": ("test_a_compiler_with_a_static_library_links_the_shared_one",),
    "library/test_imports.py": ("test_the_import_takes_no_heavy_module_besides_torch",),
    "library/test_loader.py": (
        "test_a_process_survives_what_is_no_whole_library",
        "test_documented_paths_import_without_a_warning_and_the_moved_one_with_one",
    ),
    "nn/test_architectures.py": ("test_kernels_compile_for_the_oldest_gpu",),
    "nn/test_unet1d.py": (
        "test_compiled_backward",
        "test_export_with_a_dynamic_batch",
        "test_one_dynamic_compile_serves_every_batch_and_horizon",
        "test_script_save_and_load",
    ),
    "nn/test_unet1d_changes.py": ("test_changed_layers_count", "test_changed_parts_count"),
    "ops/test_vmap_places.py": ("test_values_and_gradients",),
    "packed/test_packed_cpu.py": ("test_any_network", "test_every_level"),
    "sampling/test_inpainting.py": ("test_packed_weights_give_the_loop_step_by_step",),
    "sampling/test_parallel.py": ("test_without_tolerance_it_is_the_sequential_loop",),
    "sampling/test_sampler.py": (
        "test_scripted_and_compiled_networks",
        "test_solvers_on_packed_weights",
    ),
    "sampling/test_sampler_dtypes.py": ("test_the_copy_in_another_dtype_is_kept",),
    "sampling/test_traced.py": (
        "test_in_float64",
        "test_steps_are_the_networks",
        "test_steps_in_sixteen_bits",
    ),
    "training/test_graphed_unets.py": ("test_accelerated_training_by_replays",),
    "training/test_training_step.py": (
        "test_a_compiled_step_has_no_graph_breaks",
        "test_compilers_see_one_op_a_residual_block",
    ),
}

# The longest files, in seconds of CPU time from about 135 to 20.
LONGEST = (
    "acceleration/test_other_loops.py",
    "training/test_distributed.py",
    "eval/test_eval.py",
    "export/test_export.py",
    "library/test_jit.py",
    "schedulers/test_diffusers_versions.py",
    "acceleration/test_lerobot_loops.py",
    "nn/test_unet1d_changes.py",
    "acceleration/test_network_changes.py",
    "bench/test_bench_train.py",
    "ops/test_everywhere.py",
    "cli/test_cli.py",
    "ops/test_conv2d_norm_act.py",
    "acceleration/test_acceleration_compiled.py",
    "ops/test_properties.py",
    "nn/test_unet1d.py",
    "ops/test_own_op.py",
    "acceleration/test_user_code.py",
    "sampling/test_traced.py",
    "export/test_images.py",
    "packed/test_packed_cpu.py",
    "bench/test_bench.py",
    "faults/test_faults.py",
)


def is_slow(file: PurePath, function: str) -> bool:
    """Whether the table names a test, by its file below test/ and its function."""
    name = file.as_posix()
    proof = file.parts[0] == "ops" and function in PROOFS
    return proof or file.parts[0] in FOLDERS or name in FILES or function in TESTS.get(name, ())
