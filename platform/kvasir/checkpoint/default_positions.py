"""The positions of models whose config.json does not state them: defaults of transformers 5.19.

tests/contract/test_vllm_architectures.py compares them with the source of transformers.
"""

from __future__ import annotations

_TYPES = {
    9: "moshi_depth",
    13: "qwen3_asr_encoder",
    16: "owlv2_text_model owlvit_text_model",
    33: "csm_depth_decoder_model",
    40: "vilt",
    50: "florence_vision",
    64: "siglip2_text_model siglip_text_model tipsv2_text_model videoprism_text_model",
    77: """
aimv2_text_model clip_text_model clipseg_text_model groupvit_text_model metaclip_2_text_model
sam3_lite_text_text_model xclip_text_model
""",
    128: "blenderbot",
    256: "ctrl",
    510: "nystromformer",
    512: """
albert align_text_model bert bert-generation blenderbot-small blip_2_qformer blip_text_model bros camembert
chinese_clip_text_model convbert data2vec-text deberta deberta-v2 distilbert dpr electra ernie flaubert
flava_text_model fnet granite_speech5_encoder ibert instructblip_qformer instructblipvideo_qformer layoutlm
layoutlmv2 layoutlmv3 layoutxlm lilt longformer luke lxmert markuplm megatron-bert mobilebert moonshine mpnet
mra openai-gpt prophetnet rembert roberta roberta-prelayernorm roc_bert sew-d splinter squeezebert trocr tvp
visual_bert xlm xlm-roberta xmod
""",
    514: "altclip_text_model bridgetower_text_model clap_text_model xlm-roberta-xl",
    608: "clvp_decoder",
    750: "kyutai_speech_to_text",
    1024: """
bart biogpt canary_decoder cohere_asr decision_transformer deformable_detr dia_encoder fsmt git gpt2
gpt_bigcode m2m_100 marian mbart mvp nllb-moe pegasus plbart seamless_m4t tapas
""",
    1026: "esm",
    1500: "glmasr_encoder voxtral_realtime_encoder",
    1536: "roformer",
    2048: """
aria_text bitnet codegen csm deepseek_ocr2_text deepseek_v2 diffllama doge dots1 esmc exaone4 exaone_moe
falcon gpt_neo gpt_neox gpt_neox_japanese gptj granite granite4_vision_text granitemoe granitemoe_swa
granitemoehybrid granitemoeshared higgs_audio_v2 hrm_text hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl_text
hyperclovax idefics kosmos_2_text_model llama musicgen_decoder musicgen_melody_decoder nanochat nomic_bert
olmo olmo2 olmo3 opt perceiver phi xglm
""",
    2049: "fun_asr_nano_encoder",
    2560: "pp_formulanet",
    2704: "step3p5_vision",
    3000: "moshi",
    3072: "dia_decoder",
    4096: """
arcee big_bird bigbird_pegasus blt blt_global_transformer chameleon deepseek_v3 flex_olmo helium jetmoe
kosmos_2_5_text_model moonshine_streaming moonshine_streaming_encoder nemotron nemotron_h neucodec olmoe phi3
reformer seamless_m4t_v2 stablelm starcoder2 xcodec2 yoso zamba zamba2
""",
    5000: "nemotron3_diarization_audio nemotron_asr_streaming_encoder parakeet_encoder",
    8000: "mimi",
    8192: """
blt_patcher cohere cohere2 cohere2_moe cohere_compass_text eurobert evolla falcon_h1 gemma gemma2 granite_swa
gte jais2 modernbert modernbert-decoder t5_gemma_module vaultgemma
""",
    8194: "jina_embeddings_v3",
    9216: "emu3_text_model",
    10000: "lasr_encoder pe_audio_encoder pe_audio_video_encoder pe_video_encoder",
    16384: "afmoe canine fuyu pegasus_x persimmon timesfm2_5",
    24576: "blt_local_decoder blt_local_encoder",
    32768: """
axk1 deepseek_ocr2_encoder gemma3n_text glm4v_text minicpm3 qwen2 qwen2_5_omni_dit qwen2_5_omni_talker
qwen2_5_omni_text qwen2_5_vl_text qwen2_moe qwen2_vl_text qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe
qwen3_next qwen3_omni_moe_talker_code_predictor qwen3_omni_moe_talker_text qwen3_omni_moe_text qwen4_exp_text
smollm3
""",
    65536: "apertus glm4v_moe_text olmo_hybrid",
    128000: "lfm2 lfm2_moe qwen3_vl_moe_text qwen3_vl_text step3p5",
    131072: """
axk2 cosmos3_edge_text cwm diffusion_gemma_text ernie4_5 ernie4_5_moe ernie4_5_vl_moe_text gemma3_text
gemma4_text gemma4_vision glm glm4 glm4_moe glm_image_text glm_ocr_text gpt_oss hy_v3 inkling_text laguna
longcat_flash mellum mimo_v2_flash mllama_text_model muse_glimmer_assistant muse_glimmer_text
openai_privacy_filter paddleocr_vl_text phi4_multimodal solar_open t5gemma2_decoder t5gemma2_text youtu zaya
""",
    163840: "deepseek_v32",
    196608: "minimax_m2",
    202752: "glm4_moe_lite glm_moe_dsa",
    262144: "bamba embedding_gemma2_text gemma4_unified_text hy_v4 jamba ministral3",
    524288: "minimax_m3_vl_text seed_oss",
    1048576: "deepseek_v4 glm5_next_text kimi_linear mistral4",
}

DEFAULT_POSITIONS = {name: positions for positions, names in _TYPES.items() for name in names.split()}
"""`max_position_embeddings` by type of model, or `n_positions`, which some have instead."""
