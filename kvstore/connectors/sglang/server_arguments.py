"""Every argument of SGLang's server: whether it is in the namespace, refused, or does not matter.

Made for SGLang 0.5.23. A test compares the table with the arguments of the installed release, and
`docs/sglang_arguments.md` is generated from it. An argument that the table does not have is in the
namespace where it is set: two servers may then fail to share, but not share wrongly.

"Set" means that the value differs from SGLang's default. So a server with default arguments has the
namespace that it always had.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple


class Group(NamedTuple):
    """Arguments with the same verdict for the same reason."""

    verdict: str
    reason: str
    names: tuple[str, ...]


NAMED: Final = "in the name"
"""By other means than `argument_lines`: the weights' identity, the layout, the ranks."""
WHERE_SET: Final = "in the name where set"
"""By its value."""
CONTENTS: Final = "in the name where set, by contents"
"""By the contents of the file or folder that it names."""
REFUSED: Final = "refused"
"""SGLang does not start with kvstore, or needs kvstore's `revision`."""
NO_EFFECT: Final = "does not matter"


def _group(verdict: str, reason: str, names: str) -> Group:
    return Group(verdict, reason, tuple(names.split()))


GROUPS: Final = (
    _group(
        NAMED,
        "part of the identity of the weights, or of the model's name",
        "model_path revision served_model_name",
    ),
    _group(
        NAMED,
        "always in the digest of arguments",
        "dtype quantization json_model_override_args",
    ),
    _group(
        NAMED,
        "by the host pool: kind, dtype, layout and tokens of a page",
        "kv_cache_dtype page_size hicache_mem_layout",
    ),
    _group(
        NAMED,
        "ranks are in the namespace; KV that is equal on all ranks (MLA) is shared by all",
        "tp_size pp_size attn_cp_size attn_dp_size",
    ),
    _group(
        NAMED,
        "kvstore's keys, which include `model`, `revision` and the order of a page's bytes",
        "hicache_storage_backend_extra_config",
    ),
    _group(
        WHERE_SET,
        "changes which weights are loaded, or how, or which code computes with them. Code itself "
        "is not compared: change `revision` with it",
        """model_loader_extra_config trust_remote_code model_impl model_config_parser
        weight_version modelopt_quant quantize_and_serve offload_mode forward_hooks""",
    ),
    _group(
        WHERE_SET,
        "a loader whose weights are not the files of the model is refused without `revision`",
        "load_format",
    ),
    _group(
        WHERE_SET,
        "changes the model's configuration",
        """context_length is_embedding disable_hybrid_swa_memory c128_page_size qsa_indexer_dtype
        enable_page_major_kv_layout enable_unified_memory enable_encoder_swa_bounded_replay
        enable_decoder_swa_bounded_replay enable_hisparse hisparse_config""",
    ),
    _group(
        WHERE_SET,
        "images and sounds: changes their embeddings, or how a prompt names them",
        """enable_multimodal language_only language_model_only mm_attention_backend
        mm_process_config image_processor_backend disable_fast_image_processor
        enable_mm_global_cache trust_mm_content_hashes enable_precise_embedding_interpolation""",
    ),
    _group(
        WHERE_SET,
        "changes the precision of activations or of messages between ranks",
        """enable_tf32_matmul enable_quant_communications flashinfer_mxfp4_moe_precision
        enable_w4a4_mxfp4_megamoe deepep_dispatcher_output_dtype flashinfer_a2a_dispatch_type
        moe_a2a_backend deepep_mode deepep_v2_mode fuseep_mode
        disable_flashinfer_cutlass_moe_fp4_allgather disable_shared_experts_fusion
        enforce_shared_experts_fusion enable_waterfill ep_dispatch_algorithm
        kt_method kt_num_gpu_experts kt_max_deferred_experts_per_token enable_paged_experts
        paged_experts_num_resident prefill_kv_cache_dequant_dtype""",
    ),
    _group(
        WHERE_SET,
        "bit-equal computation is promised only among servers that have it",
        "enable_deterministic_inference rl_on_policy_target",
    ),
    _group(
        WHERE_SET,
        "chooses kernels, whose inner precision differs",
        """attention_backend decode_attention_backend prefill_attention_backend
        enable_lean_attention fp8_gemm_runner_backend fp4_gemm_runner_backend bf16_gemm_backend
        moe_runner_backend dsa_prefill_backend dsa_decode_backend dsa_topk_backend
        dsa_paged_mqa_logits_backend dsa_triton_union enable_dsa_fused_indexer
        dsv4_prefill_backend dsv4_attn_backend enable_deepseek_v4_fp4_indexer
        triton_attention_reduce_in_fp32 triton_attention_num_kv_splits
        triton_attention_split_tile_size flashinfer_mla_disable_ragged disable_chunked_prefix_cache
        enable_fused_qk_norm_rope enable_nvidia_megakernel enable_amd_monokernel
        enable_megamoe_for_layernorm_sp disable_flashinfer_autotune flashinfer_autotune_skip_ops
        enable_torch_compile cuda_graph_config""",
    ),
    _group(
        WHERE_SET,
        "changes how the states of linear attention and Mamba layers are computed or stored",
        """mamba_backend mamba_ssm_dtype enable_mamba_cache_stochastic_rounding
        mamba_cache_philox_rounds mamba_radix_cache_strategy enable_int8_mamba_checkpoint
        linear_attn_backend linear_attn_decode_backend linear_attn_prefill_backend
        linear_attn_verify_backend enable_linear_replayssm linear_replayssm_cache_len
        enable_linear_replayssm_spec enable_scattered_sconv""",
    ),
    _group(
        WHERE_SET,
        "changes how a prompt is divided among context-parallel ranks",
        "enable_prefill_cp cp_strategy enable_dsa_cache_layer_split",
    ),
    _group(
        WHERE_SET,
        "changes how LoRA adapters are applied",
        """enable_lora lora_backend lora_target_modules max_lora_chunk_size
        experts_shared_outer_loras lora_use_virtual_experts lora_strict_loading""",
    ),
    _group(
        WHERE_SET,
        "changes the KV of the draft model, whose pages are stored beside the target's",
        """speculative_algorithm speculative_draft_model_revision speculative_draft_load_format
        speculative_draft_model_quantization speculative_draft_kv_cache_dtype
        speculative_draft_window_size speculative_draft_sink_size enable_multi_layer_eagle
        speculative_attention_mode speculative_draft_attention_backend
        speculative_dsa_topk_backend speculative_moe_runner_backend speculative_moe_a2a_backend
        speculative_enable_w4a4_mxfp4_megamoe decoupled_spec_role""",
    ),
    _group(
        CONTENTS,
        "weights of a draft model or of adapters. SGLang names an adapter of --lora-paths by name "
        "and path, so other weights at the same path would be found under the old name",
        "speculative_draft_model_path uno_lora_path lora_paths kt_weight_path",
    ),
    _group(
        CONTENTS,
        "scales of the KV cache, calibration, configuration, or inputs in a file",
        """quantization_param_path rl_quant_profile modelopt_checkpoint_restore_path
        decrypted_config_file decrypted_draft_config_file debug_tensor_dump_input_file""",
    ),
    _group(
        REFUSED,
        "decode-context parallelism is not supported",
        "dcp_size dcp_comm_backend dcp_replicate_q_proj",
    ),
    _group(
        REFUSED,
        "without `revision`: the weights come from another process, or their files are deleted",
        """remote_instance_weight_loader_seed_instance_ip
        remote_instance_weight_loader_seed_instance_service_port
        remote_instance_weight_loader_send_weights_group_ports
        remote_instance_weight_loader_backend modelexpress_config weight_cache_mode
        delete_ckpt_after_loading""",
    ),
    _group(
        REFUSED,
        "the weights come while the server runs, and sharing ends with them until the storage "
        "backend is attached again with a new `revision`",
        "checkpoint_engine_wait_weights_before_ready custom_weight_loader",
    ),
    _group(
        NO_EFFECT,
        "a device of another kind differs in the last bits of its KV, which the README says; a "
        "block does not record where it was computed",
        "device",
    ),
    _group(
        NO_EFFECT,
        "places the same weights on ranks, devices or in host memory",
        """ep_size moe_dp_size moe_dense_tp_size dwdp_size enable_dp_attention
        enable_shared_experts_attn_tp shared_experts_tp_size enable_dense_mlp_attn_tp
        enable_attn_tp_input_scattered enable_layernorm_sp disable_attn_tp_gather
        enable_cp_decode_attn_tp enable_cp_tp_group_sharing enable_dp_lm_head
        enable_tp_lm_head_all_to_all mm_enable_dp_encoder ep_num_redundant_experts
        init_expert_location enable_eplb eplb_algorithm eplb_rebalance_num_iterations
        eplb_rebalance_layers_per_chunk eplb_min_rebalancing_utilization_threshold
        elastic_ep_backend enable_elastic_expert_backup ep_join_mode ep_join_rank_offset
        elastic_ep_initial_size max_ep_size elastic_ep_scale_timeout cpu_offload_gb
        offload_group_size offload_num_in_group offload_prefetch_step ple_offload_embedding
        ple_offload_backend ple_offload_dir kt_cpuinfer kt_threadpool_count""",
    ),
    _group(
        NO_EFFECT,
        "chooses how ranks add up or exchange the same numbers. SGLang chooses by batch size as "
        "well, so that prompts of one server differ likewise in the last bits",
        """enable_nccl_nvls enable_symm_mem disable_custom_all_reduce enable_mscclpp
        enable_torch_symm_mem pre_warm_nccl boundary_reduction speculative_boundary_reduction
        enable_flashinfer_allreduce_fusion enforce_disable_flashinfer_allreduce_fusion
        flashinfer_allreduce_fusion_backend enable_aiter_allreduce_fusion
        disable_aiter_allreduce_fusion_in_prefill disable_aiter_allreduce_fusion_in_decode
        enable_fused_moe_sum_all_reduce deepep_config mooncake_ib_device""",
    ),
    _group(
        NO_EFFECT,
        "decides which requests run together and when; prompts of one server differ likewise",
        """mem_fraction_static max_running_requests max_queued_requests max_total_tokens
        chunked_prefill_size prefill_decode_interval prefill_decode_interval_min_bs
        enable_dynamic_chunking max_prefill_tokens prefill_max_requests schedule_policy
        enable_priority_scheduling disable_priority_preemption default_priority_value
        abort_on_priority_when_disabled schedule_low_priority_values_first
        priority_scheduling_preemption_threshold retraction_policy schedule_conservativeness
        disable_overlap_schedule num_continuous_decode_steps scheduler_recv_interval
        enable_mixed_chunk enable_prefill_delayer prefill_delayer_max_delay_passes
        prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets
        prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio
        prefill_delayer_max_delay_ms min_free_slots_delay pp_max_micro_batch_size
        pp_async_batch_depth load_balance_method enable_dp_attention_local_control_broadcast
        enable_two_batch_overlap enable_single_batch_overlap tbo_token_distribution_threshold
        enable_pdmux pdmux_config_path sm_group_num max_lora_rank max_loaded_loras
        max_loras_per_batch lora_eviction_policy lora_drain_wait_threshold
        enable_lora_overlap_loading""",
    ),
    _group(
        NO_EFFECT,
        "records the same kernels in graphs",
        """cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_max_bs_decode
        cuda_graph_max_bs_prefill cuda_graph_bs_decode cuda_graph_bs_prefill
        cuda_graph_prefill_max_context cuda_graph_max_seq_len_prefill disable_prefill_cuda_graph
        disable_decode_cuda_graph disable_cuda_graph disable_cuda_graph_padding
        enable_profile_cuda_graph enable_cudagraph_gc debug_cuda_graph
        enable_torch_compile_debug_mode torch_compile_max_bs""",
    ),
    _group(
        NO_EFFECT,
        "size and eviction of SGLang's own caches, and transfers between them",
        """radix_eviction_policy radix_eviction_policy_config enable_session_radix_cache
        swa_full_tokens_ratio swa_prefix_tails max_mamba_cache_size mamba_full_memory_ratio
        mamba_max_states_per_path mamba_track_interval int8_mamba_ckpt_size
        enable_hierarchical_cache hicache_host_memory_mode hicache_ratio hicache_size
        hicache_host_memory_fraction hicache_write_policy hicache_io_backend
        hicache_storage_backend hicache_storage_prefetch_policy
        hicache_storage_prefetch_retry_poll_interval hicache_storage_prefetch_retry_max_attempts
        strip_thinking_cache enable_streaming_session""",
    ),
    _group(
        NO_EFFECT,
        "SGLang has no hierarchical cache with it, or none with a storage backend",
        """disable_radix_cache radix_cache_backend enable_lmcache lmcache_config_file enable_flexkv
        flexkv_config_file enable_unified_cache_external_linker
        unified_cache_external_linker_backend unified_cache_external_linker_config
        enable_linker_mla_dedup enable_kv_cache_sharding prefill_only_disable_kv_cache enable_mis
        dllm_algorithm dllm_algorithm_config dllm_fdfo encoder_only""",
    ),
    _group(
        NO_EFFECT,
        "prefill and decode servers of one deployment: KV that another server sent has that "
        "server's arguments, so give both the same",
        """disaggregation_mode disaggregation_transfer_backend disaggregation_bootstrap_port
        disaggregation_ib_device disaggregation_decode_enable_radix_cache
        disaggregation_decode_enable_offload_kvcache disaggregation_decode_retraction_backup
        disaggregation_decode_extra_slots disaggregation_decode_polling_interval
        disaggregation_enable_kv_checksum disaggregation_decode_host_receive_threshold
        disaggregation_decode_allocation_policy num_reserved_decode_tokens
        optimistic_prefill_attempts enable_pd_role_switch encoder_transfer_backend encoder_urls
        encoder_bootstrap_port encoder_register_urls enable_adaptive_dispatch_to_encoder""",
    ),
    _group(
        NO_EFFECT,
        "decides which tokens are proposed and accepted; the hash covers tokens",
        """speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens
        speculative_dflash_block_size speculative_dspark_block_size
        speculative_dspark_sps_table_path speculative_dspark_confidence_sts_path
        speculative_dspark_align_verify_tokens_to_graph_tier speculative_domino_candidate_pool_size
        speculative_accept_threshold_single speculative_accept_threshold_acc
        speculative_use_rejection_sampling speculative_use_block_verification
        speculative_token_map speculative_adaptive speculative_adaptive_config
        speculative_ngram_min_bfs_breadth speculative_ngram_max_bfs_breadth
        speculative_ngram_match_type speculative_ngram_max_trie_depth speculative_ngram_capacity
        speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget
        speculative_ngram_external_corpus_max_tokens""",
    ),
    _group(
        NO_EFFECT,
        "decides which tokens a prompt has or which are sampled; the hash covers tokens",
        """tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num
        detokenizer_worker_num skip_tokenizer_init chat_template trust_request_chat_template
        hf_chat_template_name completion_template default_chat_template_kwargs reasoning_parser
        enable_strict_thinking tool_call_parser tool_server sampling_defaults
        preferred_sampling_params allow_auto_truncate random_seed sampling_backend
        grammar_backend constrained_json_whitespace_pattern
        constrained_json_disable_any_whitespace constrained_json_max_whitespace_cnt
        enable_custom_logit_processor mlx_enable_sampling sampling_mask_max_tokens
        disable_outlines_disk_cache enable_watermark watermark_config watermark_key
        watermark_key_b watermark_context_window watermark_mixing_probability
        watermark_max_probability watermark_default_enabled watermark_enforce_all
        enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size
        dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode
        disable_tokenizer_batch_decode""",
    ),
    _group(
        NO_EFFECT,
        "used after the KV is computed",
        """enable_fp32_lm_head enable_return_hidden_states return_hidden_states_mode
        enable_return_routed_experts enable_return_indexer_topk enable_return_aux_hidden_states
        aux_hidden_state_capture return_aux_hidden_state_layer_ids return_input_ids
        return_output_ids""",
    ),
    _group(
        NO_EFFECT,
        "loading, caching or sending of the same images and sounds",
        """enable_broadcast_mm_inputs_process enable_prefix_mm_cache mm_processor_worker_num
        mm_io_worker_num allowed_media_domains media_url_max_file_size_mb
        mm_preprocess_cache_size_mb limit_mm_data_per_request mm_global_cache_backend
        mm_feature_transport asr_max_buffer_seconds asr_max_concurrent_sessions""",
    ),
    _group(
        NO_EFFECT,
        "reading or writing of the same weights. Weights that are released without a copy end "
        "sharing, as an update does",
        """download_dir startup_weight_load_mode weight_loader_disable_mmap
        weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
        weight_loader_drop_cache_after_load model_checksum modelopt_checkpoint_save_path
        modelopt_export_path
        remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port
        weight_cache_socket weight_cache_timeout enable_memory_saver enable_weights_cpu_backup
        enable_draft_weights_cpu_backup""",
    ),
    _group(
        NO_EFFECT,
        "processes, ports and devices of the server",
        """base_gpu_id gpu_id_step watchdog_timeout soft_watchdog_timeout sleep_on_idle use_ray
        custom_sigquit_handler numa_node gc_threshold nccl_port dist_timeout dist_init_addr
        gated_launch_port nnodes node_rank dp_size enable_p2p_check decoupled_spec_bind_endpoint
        decoupled_spec_connect_endpoints decoupled_spec_rank""",
    ),
    _group(
        NO_EFFECT,
        "the server's interface to its clients",
        """host port fastapi_root_path smg_grpc_mode grpc_mode grpc_port grpc_worker_threads
        grpc_response_timeout_secs sidecar sidecar_args skip_server_warmup warmups enable_http2
        http2_max_concurrent_streams http2_initial_connection_window_size
        enable_http_worker_reuseport ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password
        enable_ssl_refresh api_key admin_api_key file_storage_path enable_cache_report
        stream_interval batch_notify_size stream_response_default_include_usage
        incremental_streaming_output enable_response_store""",
    ),
    _group(
        NO_EFFECT,
        "logs, metrics, traces, dumps and checks",
        """log_level log_level_http log_requests log_requests_level log_requests_format
        log_requests_target uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost
        enable_metrics smg_http_sidecar_port enable_mfu_metrics enable_metrics_for_all_schedulers
        load_snapshot_publish_interval tokenizer_metrics_custom_labels_header
        tokenizer_metrics_allowed_custom_labels extra_metric_labels bucket_time_to_first_token
        bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets
        generation_tokens_buckets gc_warning_threshold_secs decode_log_interval
        enable_request_time_stats_logging kv_events_config load_publish_endpoint
        enable_forward_pass_metrics forward_pass_metrics_worker_id forward_pass_metrics_ipc_name
        enable_trace trace_modules otlp_traces_endpoint otlp_service_name export_metrics_to_file
        export_metrics_to_file_dir stat_loggers kv_canary kv_canary_real_data
        kv_canary_sweep_interval debug_tensor_dump_output_folder debug_tensor_dump_layers
        msprobe_dump_config enable_layerwise_nvtx_marker expert_distribution_recorder_mode
        expert_distribution_recorder_buffer_size expert_balancedness_report_mode spec_trace_dir""",
    ),
    _group(
        NO_EFFECT,
        "SGLang derives it from other arguments and from the model",
        """uses_mamba_radix_cache _speculative_draft_quantization_explicitly_set
        _radix_eviction_policy_explicitly_set _swa_full_tokens_ratio_explicitly_set""",
    ),
)

VERDICTS: Final[Mapping[str, Group]] = {name: group for group in GROUPS for name in group.names}
"""The group of each argument."""


_REQUIRED: Final = object()
"""Default of an argument without one."""


def set_arguments(server_args: Any) -> dict[str, Any]:
    """Arguments of a ServerArgs, as the user gave them, that differ from SGLang's default."""
    names = getattr(type(server_args), "__struct_fields__", None)
    if names is None:  # not SGLang's record: every value in it was set
        return {name: value for name, value in vars(server_args).items() if value is not None}
    given = getattr(type(server_args), "__struct_defaults__", ())
    defaults = (_REQUIRED,) * (len(names) - len(given)) + tuple(given)
    found = {}
    for name, default in zip(names, defaults, strict=True):
        make = getattr(default, "factory", None)
        value = getattr(server_args, name)
        if value != (make() if callable(make) else default):
            found[name] = value
    return found
