"""Says how sure a prediction is, and corrects the planner's rates by measured steps."""

from windlass.planner.predictions.confidence import CPU_SPREAD as CPU_SPREAD
from windlass.planner.predictions.confidence import CPU_SPREAD_OF_ONE_RATE as CPU_SPREAD_OF_ONE_RATE
from windlass.planner.predictions.confidence import StepInterval as StepInterval
from windlass.planner.predictions.confidence import TimesFrom as TimesFrom
from windlass.planner.predictions.confidence import interval_in_words as interval_in_words
from windlass.planner.predictions.confidence import step_interval as step_interval
from windlass.planner.predictions.measured_steps import MIN_STEPS as MIN_STEPS
from windlass.planner.predictions.measured_steps import load_measured as load_measured
from windlass.planner.predictions.past_predictions import PastPrediction as PastPrediction
from windlass.planner.predictions.past_predictions import PastPredictions as PastPredictions
from windlass.planner.predictions.rate_correction import Correction as Correction
from windlass.planner.predictions.rate_correction import MeasuredStep as MeasuredStep
from windlass.planner.predictions.rate_correction import correction_of as correction_of
