"""The architectures that vLLM 0.32 runs, and what each is for.

They are listed here because the command line checks a model on machines without vLLM.
tests/contract/test_vllm_architectures.py compares them with vLLM's registry and with transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Kind = Literal["generation", "pooling", "scoring", "draft"]
"""What an architecture is for: text, embeddings, classes and rewards, or drafts for speculative decoding."""

_TEXT = """
AfmoeForCausalLM ApertusForCausalLM ArceeForCausalLM AXK1ForCausalLM BailingMoeForCausalLM
BailingMoeV2_5ForCausalLM BailingMoeV2ForCausalLM BailingMoeV3ForCausalLM BloomForCausalLM
ChatGLMForConditionalGeneration ChatGLMModel Cohere2ForCausalLM Cohere2MoeForCausalLM CohereForCausalLM
CwmForCausalLM DbrxForCausalLM DeciLMForCausalLM DeepseekForCausalLM DeepseekV2ForCausalLM
DeepseekV32ForCausalLM DeepseekV3ForCausalLM DeepseekV4ForCausalLM Ernie4_5_MoeForCausalLM
Ernie4_5ForCausalLM Exaone4ForCausalLM ExaoneForCausalLM ExaoneMoEForCausalLM ExaoneMoeForCausalLM
FalconForCausalLM FalconH1ForCausalLM FalconMambaForCausalLM FlexOlmoForCausalLM Gemma2ForCausalLM
Gemma3ForCausalLM Gemma3nForCausalLM Gemma4ForCausalLM GemmaForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM
Glm4MoeLiteForCausalLM Glm5NextForCausalLM GlmForCausalLM GlmMoeDsaForCausalLM GPT2LMHeadModel
GPTBigCodeForCausalLM GPTJForCausalLM GPTNeoXForCausalLM GptOssForCausalLM GraniteForCausalLM
GraniteMoeForCausalLM GraniteMoeHybridForCausalLM GraniteMoeSharedForCausalLM GraniteMoeSWAForCausalLM
GraniteSWAForCausalLM HCXVisionV2ForCausalLM HrmTextForCausalLM HunYuanDenseV1ForCausalLM
HunYuanMoEV1ForCausalLM HyperCLOVAXForCausalLM HYV3ForCausalLM HYV4ForCausalLM InklingForCausalLM
InklingForConditionalGeneration InternLM2ForCausalLM InternLM3ForCausalLM IQuestCoderForCausalLM
IQuestLoopCoderForCausalLM Jais2ForCausalLM JambaForCausalLM K2HorizonForCausalLM KimiLinearForCausalLM
LagunaForCausalLM Lfm2ForCausalLM Lfm2MoeForCausalLM Llama4ForCausalLM LLaMAForCausalLM LlamaForCausalLM
LongcatFlashForCausalLM LongcatFlashNgramForCausalLM Mamba2ForCausalLM MambaForCausalLM MellumForCausalLM
MiMoForCausalLM MiMoV2FlashForCausalLM MiMoV2ForCausalLM MiniCPM3ForCausalLM MiniCPMForCausalLM
MiniMaxM2ForCausalLM MiniMaxM3SparseForCausalLM Ministral3ForCausalLM MistralForCausalLM
MistralLarge3ForCausalLM MixtralForCausalLM MuseGlimmerForCausalLM NanbeigeForCausalLM NemotronForCausalLM
NemotronHForCausalLM NemotronHPuzzleForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM OlmoeForCausalLM
OlmoForCausalLM OlmoHybridForCausalLM OPTForCausalLM OrionForCausalLM PanguEmbeddedForCausalLM
PanguProMoEV2ForCausalLM PanguUltraMoEForCausalLM Param2MoEForCausalLM Phi3ForCausalLM PhiForCausalLM
PhiMoEForCausalLM Plamo3ForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen3_5ForCausalLM
Qwen3_5MoeForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM Qwen4ExpForCausalLM
Rnj1ForCausalLM SarvamMLAForCausalLM SarvamMoEForCausalLM SeedOssForCausalLM SmolLM3ForCausalLM
SolarForCausalLM StableLmForCausalLM Starcoder2ForCausalLM Step1ForCausalLM Step3p5ForCausalLM
Step3TextForCausalLM TeleChat2ForCausalLM TeleChat3ForCausalLM TeleFLMForCausalLM VaultGemmaForCausalLM
Zamba2ForCausalLM
"""

_MULTIMODAL = """
AriaForConditionalGeneration AudioFlamingo3ForConditionalGeneration BagelForConditionalGeneration
BailingMoeV3VLForConditionalGeneration BeeForConditionalGeneration Blip2ForConditionalGeneration
Cohere2VisionForConditionalGeneration CohereAsrForConditionalGeneration CohereCompassForConditionalGeneration
Cosmos3EdgeForConditionalGeneration Cosmos3ForConditionalGeneration DeepseekOCR2ForCausalLM
DeepseekOCRForCausalLM DeepseekV41ForCausalLM DeepseekV4ForConditionalGeneration DeepseekVLV2ForCausalLM
DiffusionGemmaForBlockDiffusion Dots3NoteForCausalLM DotsOCRForCausalLM Eagle2_5_VLForConditionalGeneration
Emu3ForConditionalGeneration Ernie4_5_VLMoeForConditionalGeneration Exaone4_5_ForConditionalGeneration
FireRedASR2ForConditionalGeneration FunASRForConditionalGeneration FunAudioChatForConditionalGeneration
Gemma3ForConditionalGeneration Gemma3nForConditionalGeneration Gemma4ForConditionalGeneration
Gemma4UnifiedForConditionalGeneration GLM4VForCausalLM Glm4vForConditionalGeneration
Glm4vMoeForConditionalGeneration Glm5NextForConditionalGeneration GlmAsrForConditionalGeneration
GlmOcrForConditionalGeneration Granite4VisionForConditionalGeneration GraniteSpeechForConditionalGeneration
GraniteSpeechPlusForConditionalGeneration H2OVLChatModel HfMoondream HunYuanVLForConditionalGeneration
Idefics3ForConditionalGeneration InternS1ForConditionalGeneration InternS1ProForConditionalGeneration
InternS2MobiusForConditionalGeneration InternS2PreviewForConditionalGeneration InternVLChatModel
InternVLForConditionalGeneration IsaacForConditionalGeneration KananaVForConditionalGeneration
KeyeForConditionalGeneration KeyeVL1_5ForConditionalGeneration KimiK25ForConditionalGeneration
KimiK3ForConditionalGeneration KimiVLForConditionalGeneration Lfm2VlForConditionalGeneration
LightOnOCRForConditionalGeneration Llama4ForConditionalGeneration Llama_Nemotron_Nano_VL
LlavaForConditionalGeneration LlavaNextForConditionalGeneration LlavaNextVideoForConditionalGeneration
LlavaOnevision2ForConditionalGeneration LlavaOnevisionForConditionalGeneration MiDashengLMModel
MiMoV2OmniForCausalLM MiniCPMO MiniCPMV MiniCPMV4_6ForConditionalGeneration
MiniCPMV4_7ForConditionalGeneration MiniMaxM3SparseForConditionalGeneration Mistral3ForConditionalGeneration
Molmo2ForConditionalGeneration MolmoForCausalLM Moondream3ForCausalLM MoonshotKimiaForCausalLM MossAudioModel
MossTranscribeDiarizeForConditionalGeneration MuseGlimmerForConditionalGeneration
NemotronH_Nano_Omni_Reasoning_V3 NemotronH_Nano_VL_V2 NemotronH_Omni_Reasoning_V3
NemotronH_Super_Omni_Reasoning_V3 NemotronParseForConditionalGeneration NVLM_D
OpenCUAForConditionalGeneration OpenPanguVLForConditionalGeneration OpenVLAForActionPrediction Ovis Ovis2_5
Ovis2_6_MoeForCausalLM Ovis2_6ForCausalLM PaddleOCRVLForConditionalGeneration
PaliGemmaForConditionalGeneration Phi3VForCausalLM Phi4ForCausalLMV Phi4MMForCausalLM
PixtralForConditionalGeneration QianfanOCRForConditionalGeneration Qwen2_5_VLForConditionalGeneration
Qwen2_5OmniForConditionalGeneration Qwen2_5OmniModel Qwen2AudioForConditionalGeneration
Qwen2VLForConditionalGeneration Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration
Qwen3ASRForConditionalGeneration Qwen3ASRRealtimeGeneration Qwen3OmniMoeForConditionalGeneration
Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration Qwen4ExpForConditionalGeneration
RForConditionalGeneration SkyworkR1VChatModel SmolVLMForConditionalGeneration Step3p7ForConditionalGeneration
Step3VLForConditionalGeneration StepVLForConditionalGeneration UltravoxModel UnlimitedOCRForCausalLM
VibeVoiceAsrForConditionalGeneration VoxtralForConditionalGeneration VoxtralRealtimeGeneration
WhisperForConditionalGeneration
"""

_POOLING = """
BertForMaskedLM BertModel BertSpladeSparseEmbeddingModel BgeM3EmbeddingModel CLIPModel
ColBERTJinaRobertaModel ColBERTLfm2Model ColBERTModernBertModel ColModernVBertForRetrieval
ColPaliForRetrieval ColQwen3 ColQwen3_5 DeepseekV3BidirectionalModel EmbeddingGemma2Model Gemma2Model
Gemma3TextModel GteModel GteNewModel HF_ColBERT JinaEmbeddingsV5Model JinaForRanking LlamaBidirectionalModel
LlamaModel LlamaNemotronVLModel MistralModel ModernBertModel NomicBertModel OpsColQwen3Model Qwen2Model
Qwen3VLNemotronEmbedModel RobertaForMaskedLM RobertaModel SiglipModel Terratorch
VoyageQwen3BidirectionalEmbedModel XLMRobertaModel
"""

_SCORING = """
BertForSequenceClassification BertForTokenClassification ClefOmniForJointSchema GPT2ForSequenceClassification
GteNewForSequenceClassification InternLM2ForRewardModel JambaForSequenceClassification JinaVLForRanking
LlamaBidirectionalForSequenceClassification LlamaNemotronVLForSequenceClassification
ModernBertForSequenceClassification ModernBertForTokenClassification
OpenAIPrivacyFilterForTokenClassification Qwen2ForProcessRewardModel Qwen2ForRewardModel
Qwen3ASRForcedAlignerForTokenClassification RobertaForSequenceClassification RobertaForTokenClassification
XLMRobertaForSequenceClassification XLMRobertaForTokenClassification
"""

_DRAFT = """
BailingMoeV25MTPModel BailingMoeV3MTPModel DeepSeekMTPModel DeepseekV32MTPModel DeepSeekV4MTPModel
DFlash2DraftModel DFlashDraftModel DFlashLagunaForCausalLM DFlashMuseGlimmerAssistantModel Dots3NoteMTPModel
DSparkDraftModel DSparkV41DraftModel Eagle3DeepseekV2ForCausalLM Eagle3DeepseekV3ForCausalLM
Eagle3LlamaForCausalLM Eagle3MiniMaxM2ForCausalLM Eagle3Qwen2_5vlForCausalLM Eagle3Qwen3ForCausalLM
Eagle3Qwen3vlForCausalLM EagleCohereForCausalLM EagleDeepSeekMTPModel EagleLlama4ForCausalLM
EagleLlamaForCausalLM EagleMiniCPMForCausalLM EagleMistralForCausalLM EagleMistralLarge3ForCausalLM
ErnieMTPModel Exaone4_5_MTP ExaoneMoeMTP ExtractHiddenStatesModel Gemma4DSparkModel Gemma4MTPModel
Glm4MoeLiteMTPModel Glm4MoeMTPModel Glm5NextMTPModel GlmOcrMTPModel HYV3MTPModel HYV4MTPModel InklingMTPModel
InternS2MobiusMTP K3DSparkModel KimiK3MTPModel LiLiCorrDraftModel LlamaForCausalLMEagle3 LongCatFlashMTPModel
MedusaModel MiMoMTPModel MiMoV2MTPModel MiMoV2OmniMTPModel MiniMaxM3MTP MuseGlimmerAssistantModel
NemotronHMTPModel OpenPanguMTPModel PEagleDraftModel PeagleLlamaForCausalLM PeagleQwen3ForCausalLM
Qwen3_5MoeMTP Qwen3_5MTP Qwen3DSparkModel Qwen3NextMTP Qwen3OmniDSparkModel Qwen4ExpMTP Step3p5MTP
"""

# Classes of transformers that vLLM has no implementation of, and runs through its Transformers backend.
_TRANSFORMERS = """
AriaTextForCausalLM AXK2ForCausalLM AyaVisionForConditionalGeneration BambaForCausalLM BartForCausalLM
BartForConditionalGeneration BertLMHeadModel BigBirdPegasusForCausalLM BigBirdPegasusForConditionalGeneration
BioGptForCausalLM BitNetForCausalLM BlenderbotForCausalLM BlenderbotForConditionalGeneration
BlenderbotSmallForCausalLM BlenderbotSmallForConditionalGeneration BltForCausalLM CamembertForCausalLM
CanaryForConditionalGeneration ChameleonForConditionalGeneration CohereCompassForCausalLM
Cosmos3OmniForConditionalGeneration CsmDepthDecoderForCausalLM CsmForConditionalGeneration CTRLLMHeadModel
Data2VecTextForCausalLM DeepseekOcr2ForConditionalGeneration DeepseekVLForConditionalGeneration
DeepseekVLHybridForConditionalGeneration DiaForConditionalGeneration DiffLlamaForCausalLM DogeForCausalLM
Dots1ForCausalLM ElectraForCausalLM Emu3ForCausalLM Ernie4_5_VL_MoeForConditionalGeneration ErnieForCausalLM
FastVlmForConditionalGeneration Florence2ForConditionalGeneration FunAsrNanoForConditionalGeneration
FuyuForCausalLM Gemma4AssistantForCausalLM Gemma4UnifiedAssistantForCausalLM Gemma4UnifiedForCausalLM
GitForCausalLM Glm46VForConditionalGeneration GlmImageForConditionalGeneration
GotOcr2ForConditionalGeneration HeliumForCausalLM HiggsAudioV2ForConditionalGeneration
HyperCLOVAXVisionV2ForConditionalGeneration Idefics2ForConditionalGeneration
InstructBlipForConditionalGeneration InstructBlipVideoForConditionalGeneration JanusForConditionalGeneration
JetMoeForCausalLM Kimi_K25ForConditionalGeneration Kosmos2_5ForConditionalGeneration
Kosmos2ForConditionalGeneration KyutaiSpeechToTextForConditionalGeneration LightOnOcrForConditionalGeneration
LongT5ForConditionalGeneration M2M100ForConditionalGeneration MarianForCausalLM MBartForCausalLM
MBartForConditionalGeneration MiniMaxForCausalLM MiniMaxM3VLForCausalLM MinistralForCausalLM
Mistral4ForCausalLM MllamaForCausalLM MllamaForConditionalGeneration ModernBertDecoderForCausalLM
MoonshineForConditionalGeneration MoonshineStreamingForConditionalGeneration MoshiForCausalLM
MoshiForConditionalGeneration MT5ForConditionalGeneration MusicFlamingoForConditionalGeneration
MusicgenForCausalLM MusicgenForConditionalGeneration MusicgenMelodyForCausalLM
MusicgenMelodyForConditionalGeneration NanoChatForCausalLM NanoChatModel NllbMoeForConditionalGeneration
Ovis2ForConditionalGeneration PegasusForCausalLM PegasusForConditionalGeneration
PegasusXForConditionalGeneration PerceptionLMForConditionalGeneration PersimmonForCausalLM
Phi4MultimodalForCausalLM PhimoeForCausalLM PI0ForConditionalGeneration Pix2StructForConditionalGeneration
PLBartForCausalLM PLBartForConditionalGeneration Pop2PianoForConditionalGeneration
PPFormulaNetForConditionalGeneration Qwen2_5OmniPreTrainedModelForConditionalGeneration
Qwen2_5OmniTalkerForConditionalGeneration Qwen2_5OmniThinkerForConditionalGeneration
Qwen3OmniMoePreTrainedModelForConditionalGeneration
Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration Qwen3OmniMoeTalkerForConditionalGeneration
Qwen3OmniMoeThinkerForConditionalGeneration RecurrentGemmaForCausalLM RobertaForCausalLM
RobertaPreLayerNormForCausalLM RoCBertForCausalLM SeamlessM4TTextToUnitForConditionalGeneration
SolarOpenForCausalLM Speech2TextForConditionalGeneration SwitchTransformersForConditionalGeneration
T5ForConditionalGeneration T5Gemma2ForConditionalGeneration T5GemmaForConditionalGeneration
UdopForConditionalGeneration UMT5ForConditionalGeneration VibeVoiceForConditionalGeneration
VideoLlama3ForConditionalGeneration VideoLlavaForConditionalGeneration VipLlavaForConditionalGeneration
VoxtralRealtimeForConditionalGeneration WhisperForCausalLM XLMRobertaForCausalLM XLMRobertaXLForCausalLM
xLSTMForCausalLM XmodForCausalLM YoutuForCausalLM ZambaForCausalLM ZayaForCausalLM
"""

_REMOVED = {
    "0.9.2": "Phi3SmallForCausalLM",
    "0.10.2": """
DonutForConditionalGeneration MllamaForConditionalGeneration MotifForCausalLM Phi4FlashForCausalLM
""",
    "0.12.0": "Phi4MultimodalForCausalLM",
    "0.22.0": "JAISLMHeadModel",
    "0.23.0": """
BaiChuanForCausalLM BaichuanForCausalLM BambaForCausalLM Dots1ForCausalLM ErnieForSequenceClassification
ErnieForTokenClassification ErnieModel InternLM2VEForCausalLM InternLMForCausalLM MiniMaxForCausalLM
MiniMaxM1ForCausalLM MiniMaxText01ForCausalLM MiniMaxVL01ForConditionalGeneration QWenLMHeadModel
QwenVLForConditionalGeneration Tarsier2ForConditionalGeneration XverseForCausalLM
""",
    "0.24.0": """
AquilaForCausalLM AquilaModel AyaVisionForConditionalGeneration Grok1ForCausalLM Grok1ModelForCausalLM
MantisForConditionalGeneration MusicFlamingoForConditionalGeneration TarsierForConditionalGeneration
""",
    "0.25.0": "FuyuForCausalLM PersimmonForCausalLM TeleChatForCausalLM",
    "0.26.0": "OuroForCausalLM Plamo2ForCausalLM",
    "0.28.0": """
ArcticForCausalLM ChameleonForConditionalGeneration Cheers CheersForConditionalGeneration
Fairseq2LlamaForCausalLM FireRedLIDForConditionalGeneration GritLM HCXVisionForCausalLM MPTForCausalLM
MptForCausalLM PrithviGeoSpatialMAE RWForCausalLM StableLMEpochForCausalLM
""",
}

REMOVED = {name: version for version, names in _REMOVED.items() for name in names.split()}
"""Architectures that vLLM ran, with the last version that did."""

PLUGINS = {
    "BartForConditionalGeneration": "https://github.com/vllm-project/bart-plugin",
    "BartModel": "https://github.com/vllm-project/bart-plugin",
    "Florence2ForConditionalGeneration": "https://github.com/vllm-project/bart-plugin",
    "MBartForConditionalGeneration": "https://github.com/vllm-project/bart-plugin",
    "Nemotron3_5AsrForRNNT": "https://github.com/Sohaib-Ahmed21/vllm-nemotron-asr-plugin",
}
"""Architectures that vLLM runs with a plugin, and where that is."""

TRANSFORMERS = frozenset(_TRANSFORMERS.split())
MULTIMODAL = frozenset(_MULTIMODAL.split())
_REGISTERED: dict[str, Kind] = {
    **dict.fromkeys(_DRAFT.split(), "draft"),
    **dict.fromkeys(_SCORING.split(), "scoring"),
    **dict.fromkeys(_POOLING.split(), "pooling"),
    **dict.fromkeys(_MULTIMODAL.split(), "generation"),
    **dict.fromkeys(_TEXT.split(), "generation"),
}
KINDS: dict[str, Kind] = {**dict.fromkeys(_TRANSFORMERS.split(), "generation"), **_REGISTERED}
"""What each architecture is for. Those for text can also compute embeddings."""

_OF_IMAGES = {"LlamaNemotronVLForSequenceClassification"}
"""Architectures that classify, and put texts into a prompt of their own."""

_SUFFIXES: tuple[tuple[str, Kind], ...] = (
    ("ForCausalLM", "generation"),
    ("ForConditionalGeneration", "generation"),
    ("ChatModel", "generation"),
    ("LMHeadModel", "generation"),
    ("ForTextEncoding", "pooling"),
    ("EmbeddingModel", "pooling"),
    ("ForSequenceClassification", "pooling"),
    ("ForTokenClassification", "pooling"),
    ("ForAudioClassification", "pooling"),
    ("ForImageClassification", "pooling"),
    ("ForVideoClassification", "pooling"),
    ("ClassificationModel", "pooling"),
    ("ForRewardModeling", "pooling"),
    ("RewardModel", "pooling"),
    ("Model", "pooling"),
)
"""What vLLM takes an architecture for by its name, the first match first."""


def kind_of(architectures: Sequence[str]) -> Kind | None:
    """Return what a model with `architectures` is for, None if vLLM does not know any of them. Some are known
    by their relatives: Qwen3Model, because vLLM runs Qwen3ForCausalLM."""
    for name in architectures:
        if kind := KINDS.get(name):
            return kind
    for name in architectures:
        if (match := _suffix(name)) and any(
            name.removesuffix(match[0]) + other in _REGISTERED for other, _ in _SUFFIXES
        ):
            return match[1]
    return None


def classifies(architectures: Sequence[str]) -> bool:
    """Whether a model with `architectures` computes classes, or a score, of a text or of a pair of texts."""
    name = architectures[0] if architectures else ""
    return name.endswith("ForSequenceClassification") and name not in _OF_IMAGES


def looks_pooling(architecture: str) -> bool:
    """Whether vLLM takes an architecture that it does not know for one that pools, by its name."""
    match = _suffix(architecture)
    return match is not None and match[1] == "pooling"


def _suffix(name: str) -> tuple[str, Kind] | None:
    return next((each for each in _SUFFIXES if name.endswith(each[0])), None)
