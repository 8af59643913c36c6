// The settings: what Gradio's own fields leave out for those who use them by keys or by ear.

let hadFocus = false; // Load or Cancel

function mendSettings(settings) {
  // Beside the window nothing takes the focus.
  const isOpen = settings.classList.contains("open");
  const content = settings.querySelector(".sidebar-content");
  if (content && content.inert === isOpen) content.inert = !isOpen;
  say(settings.querySelector(".toggle-button"), isOpen);
  for (const button of settings.querySelectorAll(".gr-accordion > button")) {
    say(button, button.classList.contains("open"));
  }
  // A list that can be scrolled would be a stop for Tab, after which it never closed.
  for (const list of settings.querySelectorAll(".options:not([tabindex])")) list.tabIndex = -1;
  // Load and Cancel take each other's place.
  if (hadFocus && document.activeElement === document.body) {
    const button = [...settings.querySelectorAll("#load, #cancel")].find((b) => b.checkVisibility());
    button?.focus();
  }
}

function say(button, isOpen) {
  if (button && button.ariaExpanded !== String(isOpen)) button.ariaExpanded = String(isOpen);
}

document.addEventListener("focusin", (event) => {
  hadFocus = event.target.closest("#load, #cancel") !== null;
});

// What was typed above takes its place when the button is pressed, and moves it from under the
// pointer.
document.addEventListener("pointerdown", (event) => {
  event.target.closest("#load")?.setPointerCapture(event.pointerId);
  hadFocus = event.target.closest("#load, #cancel") !== null;
});

// They are made after the transcript; on a phone, where they cover the page, they start closed, and
// open a moment after they are made.
const until = performance.now() + 3000;
function awaitSettings() {
  const settings = document.querySelector("#settings");
  if (settings) {
    const mend = () => mendSettings(settings);
    const what = { attributeFilter: ["class", "style"], childList: true, subtree: true };
    new MutationObserver(mend).observe(settings, what);
    mend();
  } else if (performance.now() < until) requestAnimationFrame(awaitSettings);
}
function closeSettings() {
  const button = document.querySelector("#settings.open .toggle-button");
  if (button) button.click();
  else if (performance.now() < until) requestAnimationFrame(closeSettings);
}
awaitSettings();
if (matchMedia("(max-width: 768px)").matches) closeSettings();
