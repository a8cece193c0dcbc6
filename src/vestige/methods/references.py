"""Which paper is each method from? BibTeX, by the method's name."""

from __future__ import annotations

_ABADI = """@inproceedings{abadi2016deep,
  title = {Deep Learning with Differential Privacy},
  author = {Abadi, Mart{\\'i}n and Chu, Andy and Goodfellow, Ian and McMahan, H. Brendan and Mironov, Ilya
            and Talwar, Kunal and Zhang, Li},
  booktitle = {ACM Conference on Computer and Communications Security (CCS)},
  year = {2016}
}"""
_FRACTIONAL = """@article{partohaghighi2026fractional,
  title = {Deep Learning under Fractional-Order Differential Privacy},
  author = {Partohaghighi, Mohammad and Marcia, Roummel},
  journal = {arXiv:2605.09890},
  year = {2026}
}"""
_SAM = """@inproceedings{foret2021sharpness,
  title = {Sharpness-Aware Minimization for Efficiently Improving Generalization},
  author = {Foret, Pierre and Kleiner, Ariel and Mobahi, Hossein and Neyshabur, Behnam},
  booktitle = {International Conference on Learning Representations (ICLR)},
  year = {2021}
}"""
_SAT = """@inproceedings{park2023sharpness,
  title = {Differentially Private Sharpness-Aware Training},
  author = {Park, Jinseong and Kim, Hoki and Choi, Yujin and Lee, Jaewook},
  booktitle = {International Conference on Machine Learning (ICML)},
  year = {2023}
}"""
_QUANTILE = """@inproceedings{andrew2021differentially,
  title = {Differentially Private Learning with Adaptive Clipping},
  author = {Andrew, Galen and Thakkar, Om and McMahan, H. Brendan and Ramaswamy, Swaroop},
  booktitle = {Advances in Neural Information Processing Systems (NeurIPS)},
  year = {2021}
}"""

BIBTEX: dict[str, str] = {
    "sma-dp-sgd": """@article{partohaghighi2026spectral,
  title = {{SMA-DP}: Spectral Memory-Aware Differential Privacy},
  author = {Partohaghighi, Mohammad and Marcia, Roummel},
  journal = {arXiv:2605.20450},
  year = {2026}
}""",
    "dp-sgd": _ABADI,
    "fo-dp-sgd": _FRACTIONAL,
    "post-fm": _FRACTIONAL,
    "uniform-memory": _FRACTIONAL,
    "exponential-memory": _FRACTIONAL,
    "dpsur": """@article{fu2024dpsur,
  title = {{DPSUR}: Accelerating Differentially Private Stochastic Gradient Descent Using Selective Update and Release},
  author = {Fu, Jie and Ye, Qingqing and Hu, Haibo and Chen, Zhili and Wang, Lulu and Wang, Kuncan and Ran, Xun},
  journal = {Proceedings of the VLDB Endowment},
  volume = {17},
  number = {6},
  year = {2024}
}""",
    "dpsgd-br": """@article{deng2026buffered,
  title = {Stabilizing updates in differentially private stochastic gradient descent with buffered rejection},
  author = {Deng, S. and Zhang, K. and Zhang, W. and others},
  journal = {Scientific Reports},
  year = {2026},
  doi = {10.1038/s41598-026-44009-2}
}""",
    "dp-quantile": _QUANTILE,
    "dp-auto-clip": """@inproceedings{bu2023automatic,
  title = {Automatic Clipping: Differentially Private Deep Learning Made Easier and Stronger},
  author = {Bu, Zhiqi and Wang, Yu-Xiang and Zha, Sheng and Karypis, George},
  booktitle = {Advances in Neural Information Processing Systems (NeurIPS)},
  year = {2023}
}""",
    "dp-adam": """@inproceedings{kingma2015adam,
  title = {Adam: A Method for Stochastic Optimization},
  author = {Kingma, Diederik P. and Ba, Jimmy},
  booktitle = {International Conference on Learning Representations (ICLR)},
  year = {2015}
}""",
    "dp-adambc": """@inproceedings{tang2024dpadambc,
  title = {{DP-AdamBC}: Your {DP-Adam} Is Actually {DP-SGD} (Unless You Apply Bias Correction)},
  author = {Tang, Qiaoyue and Shpilevskiy, Frederick and L{\\'e}cuyer, Mathias},
  booktitle = {AAAI Conference on Artificial Intelligence},
  year = {2024}
}""",
    "dp-adamw": """@article{chooi2025dpadamw,
  title = {{DP-AdamW}: Investigating Decoupled Weight Decay and Bias Correction in Private Deep Learning},
  author = {Chooi, Jay and Cong, Kevin and Li, Russell and Sun, Lillian},
  journal = {arXiv:2511.07843},
  year = {2025}
}""",
    "adp-adamw": """@article{chilukoti2025adaptive,
  title = {Differentially Private Fine-tuned {NF-Net} to Predict {GI} Cancer Type},
  author = {Chilukoti, S. V. and Md, I. H. and Shan, L. and Tida, V. S. and Hei, X.},
  journal = {arXiv:2502.11329},
  year = {2025}
}""",
    "dp-adam-ac": """@article{yang2025dpadamac,
  title = {{DP-Adam-AC}: Privacy-preserving Fine-Tuning of Localizable Language Models Using {Adam} Optimization with
           Adaptive Clipping},
  author = {Yang, Ruoxing},
  journal = {arXiv:2510.05288},
  year = {2025}
}""",
    "dp-sam": _SAM,
    "sa-dp-sgd": _SAM,
    "dp-sat": _SAT,
    "dp-is": """@inproceedings{wei2022dpis,
  title = {{DPIS}: An Enhanced Mechanism for Differentially Private {SGD} with Importance Sampling},
  author = {Wei, Jianxin and Bao, Ergute and Xiao, Xiaokui and Yang, Yin},
  booktitle = {ACM Conference on Computer and Communications Security (CCS)},
  year = {2022}
}""",
    "doppler": """@inproceedings{zhang2024doppler,
  title = {{DOPPLER}: Differentially Private Optimizers with Low-pass Filter for Privacy Noise Reduction},
  author = {Zhang, Xinwei and Bu, Zhiqi and Hong, Mingyi and Razaviyayn, Meisam},
  booktitle = {Advances in Neural Information Processing Systems (NeurIPS)},
  year = {2024}
}""",
    "disk": """@inproceedings{zhang2025disk,
  title = {{DiSK}: Differentially Private Optimizer with Simplified {Kalman} Filter for Noise Reduction},
  author = {Zhang, Xinwei and Bu, Zhiqi and Balle, Borja and Hong, Mingyi and Razaviyayn, Meisam and Mirrokni, Vahab},
  booktitle = {International Conference on Learning Representations (ICLR)},
  year = {2025}
}""",
    "kalman-memory": """@software{vestige_kalman_memory,
  title = {Vestige: a noise-aware {Kalman} memory for differentially private training},
  author = {{The Vestige authors}},
  year = {2026}
}""",
    "dp-ftrl": """@inproceedings{kairouz2021practical,
  title = {Practical and Private (Deep) Learning without Sampling or Shuffling},
  author = {Kairouz, Peter and McMahan, H. Brendan and Song, Shuang and Thakkar, Om and Thakurta, Abhradeep
            and Xu, Zheng},
  booktitle = {International Conference on Machine Learning (ICML)},
  year = {2021}
}""",
    "dp-bandmf": """@inproceedings{choquettechoo2023amplified,
  title = {(Amplified) Banded Matrix Factorization: A Unified Approach to Private Training},
  author = {Choquette-Choo, Christopher A. and Ganesh, Arun and McKenna, Ryan and McMahan, H. Brendan and Rush, Keith
            and Thakurta, Abhradeep and Xu, Zheng},
  booktitle = {Advances in Neural Information Processing Systems (NeurIPS)},
  year = {2023}
}""",
    "dp-blt": """@inproceedings{dvijotham2024efficient,
  title = {Efficient and Near-Optimal Noise Generation for Streaming Differential Privacy},
  author = {Dvijotham, Krishnamurthy and McMahan, H. Brendan and Pillutla, Krishna and Steinke, Thomas
            and Thakurta, Abhradeep},
  booktitle = {IEEE Symposium on Foundations of Computer Science (FOCS)},
  year = {2024}
}""",
}
