from learner.plot import Curve, plot_rewards


def test_the_curve_is_a_png(tmp_path):
    curves = [Curve(label="train", points=[(0, 0.1), (1, 0.5)]), Curve(label="held out", points=[(0, 0.12)])]
    path = plot_rewards(tmp_path / "deep" / "curve.png", curves, title="unwrap", goal=0.8)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5000
