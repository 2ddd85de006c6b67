//! What decides in a simulated run.

/// A generator of numbers; the same seed, the same run.
pub struct Dice(pub u64);

impl Dice {
    pub fn roll(&mut self, sides: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32 % sides.max(1)
    }

    pub fn hits(&mut self, percent: u32) -> bool {
        self.roll(100) < percent
    }
}
